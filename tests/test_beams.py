"""Beam search on the real model is transformers', float32. A decision that is closer than TIE may go either way, and then all that follows from it:
only such a search may differ, and its best score must be as good."""

import numpy as np
import pytest
import torch

from pagedlm.core import SamplingParams
from pagedlm.scheduling.beam_search import BeamSearch
from pagedlm.serving.llm import LLM

NEW, TIE = 16, 1e-3
SENTENCES = """The capital of France is known for its museums and its food, and every summer a lot of people from all over the world come to see it.
In the beginning there was nothing but a small village at the river, where fishermen lived with their families in wooden houses.
Three students wanted to understand how large language models are served to many people at once, so they read two papers.
To bake bread you need flour, water, salt and yeast; mix them well, wait for two hours in a warm place and heat the oven.
Yesterday evening my neighbour told me that her cat had climbed the tallest tree of the street and would not come down again.""".splitlines()


@pytest.fixture(scope='module')
def llm(): return LLM(dtype='float32', max_num_seqs=160, num_blocks=1500, max_model_len=256, block_size=4, trace='full')


@pytest.fixture(scope='module')
def theirs(model_path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope='module')
def prompts(llm):
    "20 different prompts of 12 tokens, so that transformers can take them as one batch without padding."
    ids = [llm.tokenizer.encode(s) for s in SENTENCES]
    cut = [x[i:i + 12] for x in ids for i in range(0, 4 * 3, 3)]
    assert len(cut) == 20 == len(set(map(tuple, cut))) and {len(x) for x in cut} == {12}
    return cut


@pytest.fixture
def margins(monkeypatch):
    "{id of a search: the least difference between a candidate that was taken and one that was not}."
    found, advance = {}, BeamSearch.advance
    def watched(self, answers, tokens_of):
        scores = sorted((s + lp for s, a in zip(self.scores, answers) for lp in a.top_logprobs), reverse=True)
        close = min(a - b for a, b in zip(scores[self.width - 1:self.num_candidates], scores[self.width:self.num_candidates + 1]))
        found[id(self)] = min(found.get(id(self), 9), close)
        kept.append(self)                                                              # so that no id is used twice
        return advance(self, answers, tokens_of)
    kept = []
    monkeypatch.setattr(BeamSearch, 'advance', watched)
    return found


def reference(theirs, prompts, width, ends, **options):
    out = theirs.generate(torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long), num_beams=width,
                          num_return_sequences=width, max_new_tokens=NEW, do_sample=False, eos_token_id=list(ends),
                          pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options)
    answers = []
    for row, score in zip(out.sequences[:, len(prompts[0]):].tolist(), out.sequences_scores.tolist()):
        stop = next((i + 1 for i, t in enumerate(row) if t in ends), len(row))
        answers.append((row[:stop], score))
    return [answers[i:i + width] for i in range(0, len(answers), width)]


OPTIONS = dict(length_penalty=0.0, early_stopping=True), dict(length_penalty=2.0, early_stopping='never'), dict(length_penalty=-1.0)

@pytest.mark.parametrize('width, options, stops', [(2, {}, ''), (4, {}, ''), (6, {}, ''), *[(4, o, '., and') for o in OPTIONS]])
def test_beams_are_transformers(llm, theirs, prompts, margins, width, options, stops):
    "stops: words that end a beam, so that many do, and all rules about ended ones are at work."
    more = tuple(llm.tokenizer.encode(stops)) if stops else ()
    some, ends = prompts[::4] if stops else prompts, {*llm.tokenizer.eos_token_ids, *more}
    params = SamplingParams(beam_width=width, n=width, temperature=0, max_tokens=NEW, stop_token_ids=more, **options)
    ours = llm.generate(some, params, use_tqdm=False)
    ties, close = 0, list(margins.values())                                            # in the order of the prompts
    assert len(close) == len(some)
    for out, want, margin in zip(ours, reference(theirs, some, width, ends, **options), close):
        got = [(list(o.token_ids), o.score) for o in out.outputs]
        if [t for t, _ in got] == [t for t, _ in want]: assert np.allclose([s for _, s in got], [s for _, s in want], atol=2e-3)
        else:
            ties += 1
            assert margin < TIE and got[0][1] > want[0][1] - 2e-3, (margin, got, want)
    near = sum(c < TIE for c in close)
    if stops: assert sum(o.finish_reason == 'stop' for out in ours for o in out.outputs) >= 2
    print(f'width {width}: {len(some)} searches, {near} with a decision closer than {TIE}, {ties} differ')
    assert ties <= len(some) // 5


def test_no_kv_moves_but_the_last_block(llm, prompts):
    "Blocks copied: at most one for each fork, none swapped, and nothing recomputed."
    before = len(llm.trace)
    llm.generate(prompts[0], SamplingParams(beam_width=4, temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    plans = llm.trace.plans[before:]
    forks = sum(int((p.beams[:, 0] != p.beams[:, 1]).sum()) for p in plans)
    assert forks > 3 and sum(len(p.copies) for p in plans) <= forks and sum(p.num_tokens for p in plans) <= 12 + 23 * 4
    assert all((p.stops - p.starts == 1).all() for p in plans[1:]) and not any(len(p.swap_outs) for p in plans)
