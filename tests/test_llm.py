"The offline API on the default model: how long it takes to load, its dtypes, and scripts written for vLLM."
import inspect
import time

import numpy as np
import pytest

from pagedlm import LLM, InvalidRequestError, ConfigError, SamplingParams
from pagedlm.memory.block_manager import check_pool

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope='module')
def llm(model_path) -> LLM: return LLM(dtype='float32', max_model_len=512, num_blocks=64, max_num_seqs=8)


def test_loads_in_three_seconds(model_path):
    "The cached model, its tokenizer and its engine; the better of two tries, since the first may find a cold page cache."
    times = []
    for _ in range(2):
        start = time.perf_counter()
        LLM(max_model_len=512)
        times.append(time.perf_counter() - start)
    assert min(times) < 3, times


@pytest.mark.parametrize('dtype', ['bfloat16', 'auto', 'half', 'float'])
def test_dtypes(llm, dtype):
    "Every precision, also by vLLM's names, finds the first token of an answer as likely as float32 does, to a rounding."
    one = LLM(dtype=dtype, max_model_len=128, num_blocks=16, max_num_seqs=2)
    prompt = llm.chat_prompt([{'role': 'user', 'content': 'What is the capital of France?'}])
    ours, want = (m.generate(prompt, SamplingParams(temperature=0, max_tokens=8, logprobs=5), use_tqdm=False)[0].outputs[0] for m in (one, llm))
    both = ours.logprobs[0].keys() & want.logprobs[0].keys()
    assert len(both) >= 3 and all(abs(ours.logprobs[0][t].logprob - want.logprobs[0][t].logprob) < 0.2 for t in both)
    assert len(ours.token_ids) > 5 and one.engine.scheduler.memory.num_free_blocks == one.engine.scheduler.memory.num_blocks


def test_prompts_in_every_form(llm):
    "A string, ids as list, tuple, array or dict, one or several: the same answer, in the order of the prompts."
    text = 'The capital of France is'
    ids = llm.tokenizer.encode(text)
    forms = [text, ids, tuple(ids), np.array(ids), {'prompt': text}, {'prompt_token_ids': ids}, {'prompt': text, 'prompt_token_ids': ids}]
    answers = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms] + [[o] for o in llm.generate(forms, GREEDY, use_tqdm=False)]
    assert {(len(a), a[0].outputs[0].text, tuple(a[0].prompt_token_ids)) for a in answers} == {(1, answers[0][0].outputs[0].text, tuple(ids))}
    assert [o.prompt for o in llm.generate(['One', 'Two', 'Three'], GREEDY, use_tqdm=False)] == ['One', 'Two', 'Three']


def test_reads_like_vllm(llm):
    "The names that a script for vLLM uses."
    assert list(inspect.signature(LLM.generate).parameters)[1:4] == ['prompts', 'sampling_params', 'use_tqdm']
    assert list(inspect.signature(LLM.chat).parameters)[1:4] == ['messages', 'sampling_params', 'use_tqdm']
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=5, logprobs=1, n=2)
    for output in llm.generate(['Hello, my name is', 'The future is'], params, use_tqdm=False):
        assert isinstance(output.prompt, str) and output.finished and output.request_id
        for o in output.outputs:
            assert (len(o.token_ids), o.finish_reason, len(o.logprobs)) == (5, 'length', 5) and o.cumulative_logprob < 0 and o.text
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_tokenizer() is llm.tokenizer


@pytest.mark.parametrize('call', [
    lambda m: m.generate('a', GREEDY, lora_request=None), lambda m: m.generate('a', {'max_tokens': 3}), lambda m: m.generate(None),
    lambda m: m.generate([1.5]), lambda m: m.generate([['1']]), lambda m: m.generate(b'abc'), lambda m: m.generate(['ok', '']),
    lambda m: m.chat([{'role': 'user', 'content': 'a'}], add_special=1), lambda m: m.stream('a', [GREEDY, GREEDY]),
    lambda m: SamplingParams(bad_words=['a'])])
def test_mistakes_are_typed_and_harmless(llm, call):
    with pytest.raises(InvalidRequestError): call(llm)
    check_pool(llm.engine.scheduler.memory)
    assert not llm.engine.has_unfinished and llm.generate('The capital of France is', GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize('kw', [dict(tensor_parallel_size=2), dict(block_sizes=1), dict(num_blocks=10.5), dict(device='bad'), dict(seed=-1),
                                dict(memory='flat'), dict(policy='lifo'), dict(max_model_len=0), dict(memory='contiguous', swap_blocks=4)])
def test_bad_options_are_typed(model_path, kw):
    with pytest.raises(ConfigError): LLM(**kw)
