"""How likely texts are, by the engine: equal to transformers' within 1e-4, in chunks, after preemptions, with and without prefix hits."""
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT

from pagedlm import LLM, ConfigError, GraphRunner, InvalidRequestError, ModelRunner, NewSequence, Plan, SamplingParams
from pagedlm.compute.attention import gather_attention
from pagedlm.compute.kv_cache import KVCache
from pagedlm.compute.model import Decoder, ModelConfig, random_weights
from pagedlm.compute.sampler import Sampler
from pagedlm.memory.block_manager import check_pool
from pagedlm.trace import Trace

CLOSE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=6)
CONTEXT = ('Paris is the capital of France, Rome is the capital of Italy, Athens is the capital of Greece, '
           'Vienna is the capital of Austria, and Madrid is the capital of')
CONTINUATIONS = [' Spain', ' Portugal', ' Spain.', ' Spain, and', ' the world', ' nothing at all', ' Brazil', ' banana', ' a large country',
                 ' Castile, where it rains', 's', ' 17', ' Spain\n', '\n\n', ' SPAIN', ' España', ' 西班牙', ' Spain' * 12, ' it', '?']


@pytest.fixture(scope='module')
def llm(model_path): return LLM(dtype='float32', max_model_len=512, num_blocks=96, max_num_seqs=8, max_num_batched_tokens=40, trace='full')


@pytest.fixture(scope='module')
def reference(model_path):
    "Log probabilities of every token at every place of a text, [len(ids), vocab_size], by transformers."
    from transformers import AutoModelForCausalLM
    model, known = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval(), {}
    @torch.inference_mode()
    def look(ids):
        if tuple(ids) not in known: known[tuple(ids)] = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return known[tuple(ids)]
    return look


@pytest.fixture(scope='module')
def prompts(llm):
    "Of uneven lengths, one of which is a single token."
    text = llm.tokenizer.encode((ROOT/'LICENSE').read_text(encoding='utf-8'))
    return [text[100 * i:100 * i + n] for i, n in enumerate((1, 2, 120, 33, 5, 16, 17, 61))]


def check_prompt(output, reference, first=1):
    "Each place has its own token and the three best, with transformers' numbers."
    ids, told = output.prompt_token_ids, output.prompt_logprobs
    want = reference(ids)
    assert len(told) == len(ids) and told[:first] == [None] * min(first, len(ids))
    for i in range(first, len(ids)):
        best = want[i - 1].topk(4).values
        assert 3 <= len(told[i]) <= 4 and sorted(lp.rank for lp in told[i].values())[:3] == [1, 2, 3]
        for token, lp in told[i].items():
            assert abs(lp.logprob - want[i - 1, token]) < CLOSE
            assert lp.rank > 3 or abs(lp.logprob - best[lp.rank - 1]) < CLOSE
            assert token == ids[i] or lp.logprob > best[3] - CLOSE
        own = told[i][ids[i]]
        assert (want[i - 1] > own.logprob + CLOSE).sum() < own.rank <= (want[i - 1] > own.logprob - CLOSE).sum() + 1


def told_twice(llm):
    "Places of prompts that came more than once."
    pieces = [x for r in llm.trace.results for x in r.prompt_logprobs]
    return sum(n > 1 for n in Counter((x.seq_id, x.start + i) for x in pieces for i in range(len(x.logprobs))).values())


def test_prompts_in_chunks(llm, prompts, reference):
    outputs = llm.generate(prompts, GREEDY.replace(prompt_logprobs=3), use_tqdm=False)
    for o in outputs: check_prompt(o, reference)
    assert sum(len(r.prompt_logprobs) for r in llm.trace.results) > len(prompts)            # some were told in several pieces
    assert not told_twice(llm) and not llm.engine.executor.asked and not llm._curious


def test_prompts_of_several_samples(llm, prompts, reference):
    outputs = llm.generate(prompts[2:5], SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=3, prompt_logprobs_from=3), use_tqdm=False)
    for o in outputs: check_prompt(o, reference, first=3)


@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
def test_prompts_after_preemptions(llm, prompts, reference, preemption):
    "A prompt that is thrown out half told is told again, and all numbers are right."
    small = llm.variant(block_size=4, num_blocks=21, max_num_batched_tokens=8, preemption=preemption, swap_blocks=40,
                        enable_prefix_caching=False)
    asked = [GREEDY.replace(prompt_logprobs=3, ignore_eos=True, max_tokens=n) for n in (20, 20, 2, 4)]
    outputs = small.generate([prompts[i] for i in (4, 1, 7, 3)], asked, use_tqdm=False)
    for o in outputs: check_prompt(o, reference)
    assert small.engine.scheduler.num_preemptions and bool(told_twice(small)) == (preemption == 'recompute')


def pairs(llm):
    "The continuations' tokens, by hand."
    whole = [llm.tokenizer.encode(CONTEXT + c) for c in CONTINUATIONS]
    return whole, len(llm.tokenizer.encode(CONTEXT))


@pytest.mark.parametrize('caching', [True, False])
def test_scores(llm, reference, caching):
    "Twenty continuations of one context, computed once or twenty times."
    one = llm.variant(enable_prefix_caching=caching)
    scores, (whole, n) = one.score([CONTEXT] * len(CONTINUATIONS), CONTINUATIONS, use_tqdm=False), pairs(llm)
    for ids, score in zip(whole, scores, strict=True):
        want = reference(ids)[n - 1:-1]
        tokens = torch.tensor(ids[n:])
        each = want.gather(1, tokens[:, None])[:, 0]
        assert score.token_ids == ids[n:] and np.allclose(score.token_logprobs, each, atol=CLOSE, rtol=0)
        assert abs(score.logprob - float(each.double().sum())) < CLOSE * len(tokens)
        best, second = want.topk(2).values.T
        if (best - second).min() > 1e-3: assert score.is_greedy == bool((each == best).all())
    assert scores[0].is_greedy and not scores[7].is_greedy and max(scores, key=lambda s: s.logprob) in (scores[0], scores[10])
    computed, memory = int(one.trace['num_tokens'].sum()), one.engine.scheduler.memory
    assert (computed < sum(map(len, whole)) / 2) == caching
    assert memory.num_free_blocks == memory.num_blocks
    check_pool(memory)


def test_scores_of_token_ids(llm):
    "Ids score as their text does, in any mixture of the two, one or several."
    whole, n = pairs(llm)
    ids, rest, texts = whole[0][:n], [w[n:] for w in whole[:3]], CONTINUATIONS[:3]
    want = llm.score([CONTEXT] * 3, texts, use_tqdm=False)
    for contexts, continuations in (([ids] * 3, rest), ([np.array(ids)] * 3, texts), ([CONTEXT] * 3, rest)):
        got = llm.score(contexts, continuations, use_tqdm=False)
        assert [s.token_ids for s in got] == rest and np.allclose([s.logprob for s in got], [s.logprob for s in want], atol=CLOSE)
    [one], [spaced] = llm.score(CONTEXT, texts[0], use_tqdm=False), llm.score(CONTEXT + ' ', texts[0][1:], use_tqdm=False)
    assert one.token_ids == spaced.token_ids == rest[0]                                     # the space belongs to the word


def test_hits_leave_what_is_asked_for(llm, prompts, reference):
    "A prompt that is cached as a whole is computed again from the first place that somebody wants to know about."
    one = llm.variant()
    one.generate(prompts[2], GREEDY, use_tqdm=False)
    for first, most in ((1, 0), (40, 39), (110, 109)):
        [o] = one.generate(prompts[2], GREEDY.replace(prompt_logprobs=3, prompt_logprobs_from=first), use_tqdm=False)
        check_prompt(o, reference, first)
        assert most - 16 < o.num_cached_tokens <= most
    assert one.generate(prompts[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 112


def test_salts_and_priorities(llm, prompts):
    one, text = llm.variant(max_num_seqs=1), llm.tokenizer.decode(prompts[7])
    salted = {'prompt_token_ids': prompts[7], 'cache_salt': 'a'}
    hits = [one.generate(p, GREEDY, use_tqdm=False)[0].num_cached_tokens for p in (salted, salted, prompts[7], {**salted, 'cache_salt': 'b'})]
    assert hits == [0, 48, 0, 0]
    one.generate([text, text, text], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    assert [e.request_id for e in one.trace.events if e.kind == 'finish'][-3:] == ['6', '5', '4']


def test_echo(llm):
    text, ids = 'The capital of France is', llm.tokenizer.encode('The capital of France is')
    plain = llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0]
    for n in (0, 1, 6):
        for prompt in (text, ids):
            [o] = llm.generate(prompt, GREEDY.replace(max_tokens=n, n=2), use_tqdm=False, echo=True)
            for sample in o.outputs:
                assert sample.token_ids == ids + plain.token_ids[:n] and sample.finish_reason == 'length'
                assert sample.text == text + llm.tokenizer.decode(plain.token_ids[:n])
    bare = llm.generate(text, GREEDY.replace(detokenize=False), use_tqdm=False, echo=True)[0].outputs[0]
    assert bare.text == '' and bare.token_ids == ids + plain.token_ids


def test_a_trace_file_keeps_what_was_told(llm, prompts, tmp_path):
    llm.generate(prompts[3], GREEDY.replace(prompt_logprobs=2, max_tokens=1), use_tqdm=False)
    llm.trace.to_json(tmp_path/'run.json')
    there, again = ([p for r in t.results if r for p in r.prompt_logprobs] for t in (llm.trace, Trace.from_json(tmp_path/'run.json')))
    assert len(there) == len(again) > 0
    for a, b in zip(there, again):
        assert a[:2] == b[:2] and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a[2:], b[2:]))


def test_stream_takes_parameters_one_by_one(llm):
    texts = {}
    for delta in llm.stream(['One', 'Two'], (GREEDY.replace(max_tokens=n) for n in (2, 3))):
        texts[delta.prompt_index] = texts.get(delta.prompt_index, 0) + len(delta.token_ids)
    assert texts == {0: 2, 1: 3}


def test_best_of(llm, reference):
    "The best of six, by what transformers thinks of them; what was not asked for is not told."
    six = SamplingParams(n=6, seed=3, max_tokens=8)
    [o], [drawn] = (llm.generate(CONTEXT, p, use_tqdm=False) for p in (six.replace(n=2, best_of=6), six))
    def mean(ids):
        want = reference(o.prompt_token_ids + ids)[len(o.prompt_token_ids) - 1:-1]
        return float(want.gather(1, torch.tensor(ids)[:, None]).mean())
    order = sorted((s.token_ids for s in drawn.outputs), key=mean, reverse=True)
    assert [s.token_ids for s in o.outputs] == order[:2] and [s.index for s in o.outputs] == [0, 1]
    assert mean(order[0]) > mean(order[-1]) + .1
    assert all(s.logprobs is None and abs(s.cumulative_logprob / len(s.token_ids) - mean(s.token_ids)) < CLOSE for s in o.outputs)
    assert o.finished and llm.generate(CONTEXT, six.replace(n=2, best_of=2, logprobs=1), use_tqdm=False)[0].outputs[0].logprobs
    assert [d.index for d in llm.stream(CONTEXT, six.replace(n=2, best_of=2, max_tokens=1))] == [0, 1]


def test_beams_come_at_the_end(llm):
    "The n best of the beams, the best first, each as likely as it says; beside a neighbour, who does not notice."
    [alone] = llm.generate('The sea', GREEDY, use_tqdm=False)
    wide = SamplingParams(temperature=0, beam_width=4, n=2, max_tokens=9, length_penalty=0.5)
    beams, beside = llm.generate([CONTEXT, 'The sea'], [wide, GREEDY], use_tqdm=False)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids and [o.index for o in beams.outputs] == [0, 1]
    scores = llm.score([beams.prompt_token_ids] * 2, [o.token_ids for o in beams.outputs], use_tqdm=False)
    assert np.allclose([o.cumulative_logprob for o in beams.outputs], [s.logprob for s in scores], atol=10 * CLOSE)
    assert [o.score for o in beams.outputs] == sorted((o.cumulative_logprob / len(o.token_ids) ** .5 for o in beams.outputs), reverse=True)
    for o in beams.outputs:
        ended = o.token_ids[-1] in llm.tokenizer.eos_token_ids
        assert o.text == llm.tokenizer.decode(o.token_ids) and o.finish_reason == ('stop' if ended else 'length') and o.logprobs is None


def test_beams_aborted(llm):
    "What was aborted in the middle of its search has no text and says so."
    def on_step(llm):
        if next(steps) == 3: llm.engine.abort([*llm._live][0])
    steps, llm.on_step = iter(range(99)), on_step
    try: beams, beside = llm.generate(['The sea', 'The sea'], [SamplingParams(temperature=0, beam_width=3), GREEDY], use_tqdm=False)
    finally: llm.on_step = None
    assert [(o.text, o.token_ids, o.finish_reason, o.score) for o in beams.outputs] == [('', [], 'abort', None)]
    assert beside.outputs[0].finish_reason == 'length' and llm.engine.scheduler.memory.num_free_blocks == 96


@pytest.mark.parametrize('call', [
    lambda m: m.score('', 'a'), lambda m: m.score('a', ''), lambda m: m.score(['a', 'b'], ['c']), lambda m: m.score([[]], [[1]]),
    lambda m: m.score([[1]], [[]]), lambda m: m.score('a', None), lambda m: m.score({'prompt': 'a'}, 'b'), lambda m: m.score([[1]], [[50_000]]),
    lambda m: m.score(['a', 'a' * 3000], ['b', 'b']), lambda m: m.generate('a', GREEDY, priority=[1, 2]),
    lambda m: m.generate('a', GREEDY, priority='1'), lambda m: m.generate('a', GREEDY, priority=-1), lambda m: m.generate({'prompt': 'a', 'cache_salt': 3}, GREEDY),
    lambda m: m.stream('a', SamplingParams(best_of=2)), lambda m: m.stream(['a'], [GREEDY.replace(beam_width=2)]),
    lambda m: m.stream('a', GREEDY, priority=2000)])
def test_mistakes(llm, call):
    with pytest.raises(InvalidRequestError): call(llm)
    assert not llm.engine.has_unfinished and not llm._live and not llm._curious and llm.score('a', ' b', use_tqdm=False)[0].logprob < 0


def test_prefix_caching_is_on_or_off(llm):
    with pytest.raises(ConfigError): llm.variant(enable_prefix_caching=1)
    reserved = llm.variant(memory='contiguous')                                             # which shares nothing, and says nothing
    assert [reserved.generate(CONTEXT, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)] == [0, 0]


CONFIG = ModelConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)


class Listening(Sampler):
    def sample(self, logits, rows, num_tokens):
        self.heard = logits.clone()
        return super().sample(logits, rows, num_tokens)


@pytest.fixture(scope='module')
def made_up(): return Decoder(CONFIG, random_weights(CONFIG))


def make(runner, model, num_blocks=200):
    kv = KVCache(CONFIG.num_layers, num_blocks, 1, CONFIG.num_kv_heads, CONFIG.head_dim, torch.float32)
    return runner(model, kv, Listening(8, CONFIG.vocab_size), gather_attention)


def prompt_plan(prompt, params, width=1):
    "A prompt in blocks of one token, and the samples that go on from it."
    each, n = np.arange(width), len(prompt)
    new = tuple(NewSequence(i, 'r', i, np.array(prompt), params) for i in range(width))
    forks = np.array([(0, i) for i in range(1, width)], np.int64).reshape(-1, 2)
    return Plan(0, each[:1], np.array([0]), np.array([n]), np.array([0]), np.array([0, n]), np.arange(n), each, 0 * each, new, forks=forks)


def decode_plan(at, first_block, width, **more):
    each, ones = np.arange(width), np.ones(width, int)
    return Plan(at, each, at * ones, (at + 1) * ones, at * ones, np.arange(width + 1), first_block + each, each, each, **more)


@pytest.mark.parametrize('runner', [ModelRunner, GraphRunner])
def test_beams_change_places(made_up, runner):
    "After every step each beam has the logits of its text as computed from scratch, whoever took whose place."
    prompt, width, rng = [5, 3, 9, 1, 60], 5, np.random.default_rng(0)
    beams, texts = make(runner, made_up), [[5, 3, 9, 1, 60]] * width
    tokens = beams.execute(prompt_plan(prompt, SamplingParams(temperature=0, beam_width=width), width)).logprobs
    assert len({t.top_ids[0] for t in tokens}) == 1 and all(len(t.top_ids) == 2 * width for t in tokens)
    moved = 0
    for at in range(len(prompt), len(prompt) + 10):
        parents, last = rng.integers(0, width, width), rng.integers(0, 97, width)
        texts, moved = [texts[p] + [int(t)] for p, t in zip(parents, last)], moved + int((parents != np.arange(width)).sum())
        some = rng.permutation(width)                                                       # in no order
        move = np.stack([parents, np.arange(width), last], 1)[some]
        result = beams.execute(decode_plan(at, len(prompt) + width * (at - len(prompt)), width, beams=move))
        for row, text, told in zip(beams.sampler.heard, texts, result.logprobs, strict=True):
            scratch = make(ModelRunner, made_up)
            scratch.execute(prompt_plan(text, SamplingParams(temperature=0)))
            assert torch.allclose(row, scratch.sampler.heard[0], atol=CLOSE) and told.top_ids[0] == int(row.argmax())
    assert moved > 20 and [beams.rows.tokens[beams.rows.row[i], :len(t)].tolist() for i, t in enumerate(texts)] == texts


@pytest.mark.parametrize('runner', [ModelRunner, GraphRunner])
def test_prompts_told_by_single_tokens(made_up, runner):
    "A prompt computed one token a step, beside one that decodes, and in one piece: the same numbers."
    prompt, params = np.random.default_rng(1).integers(0, 97, 12), SamplingParams(temperature=0, prompt_logprobs=2)
    whole = make(ModelRunner, made_up).execute(prompt_plan(prompt, params)).prompt_logprobs
    assert [(x.start, len(x.logprobs), x.top_ids.shape) for x in whole] == [(1, 11, (11, 2))]
    one, told, first, both = make(runner, made_up), [], np.zeros(1, int), np.array([0, 1])
    one.execute(prompt_plan([4, 2], SamplingParams(temperature=0)))
    for at in range(12):
        new = () if at else (NewSequence(1, 's', 0, prompt, params),)
        starts = np.array([2 + at, at])
        due = both if at == 11 else both[:1]
        told += one.execute(Plan(at + 1, both, starts, starts + 1, starts, np.arange(3), 20 + 2 * at + both, due, due, new)).prompt_logprobs
    assert [(x.seq_id, x.start) for x in told] == [(1, i) for i in range(1, 12)] and not one.asked
    for i, name in enumerate(('logprobs', 'ranks', 'top_ids', 'top_logprobs'), 2):
        assert np.allclose(np.concatenate([x[i] for x in told]), whole[0][i], atol=CLOSE), name
