"""Models that people bring: small random ones of every supported type, saved by transformers, loaded by pagedlm, and equal to 1e-4 in every
logit, however their tokens come: whole, in chunks, one by one, among others, again after a preemption, behind a shared prefix."""
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pagedlm.compute.attention import AttnMeta, check, gather_attention, make_case
from pagedlm.compute.cpu_attention import paged_attention
from pagedlm.compute.kv_cache import KVCache
from pagedlm.compute.model import MODEL_TYPES, Decoder, ModelConfig, random_weights, weight_shapes
from pagedlm.compute.weights import load
from pagedlm.core import ConfigError, Request, SamplingParams
from test_equal_tokens import CapturingSampler, compare, serve

VOCAB, LONGEST, GONE = 261, 160, np.iinfo(np.int32).max
BASE = dict(vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=1, pad_token_id=None)
LLAMA = BASE | dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
QWEN2 = BASE | dict(hidden_size=96, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1)
OLDER = BASE | dict(hidden_size=96, num_attention_heads=3)
MODELS = {
    'llama': ('llama', LLAMA),
    'mistral': ('mistral', LLAMA | dict(sliding_window=9)),
    'mistral, wide': ('mistral', LLAMA | dict(sliding_window=20, tie_word_embeddings=True)),
    'mistral, no window': ('mistral', LLAMA | dict(sliding_window=None)),
    'qwen2': ('qwen2', QWEN2 | dict(sliding_window=9)),                                   # which is not in use
    'qwen2, last layer slides': ('qwen2', QWEN2 | dict(use_sliding_window=True, sliding_window=12, max_window_layers=2)),
    'qwen3': ('qwen3', LLAMA | dict(tie_word_embeddings=True)),
    'qwen3, biases, all slide': ('qwen3', LLAMA | dict(attention_bias=True, use_sliding_window=True, sliding_window=11, max_window_layers=0)),
    'gpt2': ('gpt2', OLDER),
    'gpt2, other sizes': ('gpt2', OLDER | dict(hidden_size=72, n_inner=100, activation_function='gelu')),      # heads of 24
    'opt': ('opt', OLDER | dict(ffn_dim=112)),
    'opt, no biases, untied': ('opt', OLDER | dict(ffn_dim=64, enable_bias=False, tie_word_embeddings=False, activation_function='gelu_new'))}
WINDOWS = {'mistral': 9, 'mistral, wide': 20, 'qwen3, biases, all slide': 11}
BACKENDS = {'gather': gather_attention, 'numba': paged_attention}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "f(name): (transformers' model, the folder that it was saved to), made once."
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kept = {}
    def make(name):
        if name not in kept:
            kind, options = MODELS[name]
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()
            gen = torch.Generator().manual_seed(1)
            for n, p in model.named_parameters():
                is_norm = 'norm' in n or '.ln_' in n
                p.data = torch.randn(p.shape, generator=gen) * (.2 if p.ndim == 1 else p.shape[1] ** -.5) + (is_norm and n.endswith('weight'))
            model.tie_weights()
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            kept[name] = model, folder
        return kept[name]
    return make


@torch.inference_mode()
def logits_of(model, ids): return model(torch.as_tensor(ids)[None]).logits[0].float()


class Pool:
    """Sequences in one cache, block by block: `feed` runs chunks of any of them in one forward. Whatever nobody may read is NaN, or no
    block's number. With a window in all layers, blocks that fell out of it go to others, as a block manager would have it."""
    def __init__(self, decoder, block_size, attention, num_blocks=120):
        c = decoder.config
        self.decoder, self.size, self.attention, self.window = decoder, block_size, attention, c.sliding_window
        self.kv = KVCache(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, decoder.dtype)
        self.kv.kv.fill_(torch.nan)
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.refs, self.tables, self.done, self.given_back = dict.fromkeys(self.free, 0), {}, {}, 0

    def share(self, parent, child, num_blocks):
        "A new sequence whose first blocks are another's."
        self.tables[child], self.done[child] = self.tables[parent][:num_blocks], num_blocks * self.size
        for b in self.tables[child]:
            if b != GONE: self.refs[b] += 1

    def drop(self, block):
        self.refs[block] -= 1
        if self.refs[block]: return
        self.kv.kv[:, :, block] = torch.nan
        self.free.append(block)

    def preempt(self, seq):
        for b in self.tables.pop(seq):
            if b != GONE: self.drop(b)
        del self.done[seq]

    def feed(self, chunks):
        "chunks {seq: ids}. Returns {seq: logits of each of its tokens}."
        starts = [self.done.setdefault(s, 0) for s in chunks]
        stops = [start + len(ids) for start, ids in zip(starts, chunks.values())]
        for s, stop in zip(chunks, stops):
            table = self.tables.setdefault(s, [])
            while len(table) * self.size < stop:
                table.append(self.free.pop(0))
                self.refs[table[-1]] += 1
            self.done[s] = stop
        tables = np.full((len(chunks), max(len(self.tables[s]) for s in chunks) + 1), GONE, np.int64)
        for row, s in zip(tables, chunks): row[:len(self.tables[s])] = self.tables[s]
        meta = AttnMeta.build(starts, stops, tables, self.size)
        ids = torch.as_tensor(np.concatenate(list(chunks.values())))
        logits = self.decoder(ids, self.kv, meta, torch.arange(len(ids)), self.attention)
        for s in chunks if self.window else ():
            for i in range(max(0, self.done[s] - self.window + 1) // self.size):
                if self.tables[s][i] != GONE:
                    self.drop(self.tables[s][i])
                    self.tables[s][i], self.given_back = GONE, self.given_back + 1
        return dict(zip(chunks, logits.split([len(ids) for ids in chunks.values()])))


def texts(n, seed=3): return np.random.default_rng(seed).integers(0, VOCAB, (n, 100))


def same(got, want):
    assert got.dtype == torch.float32 and got.shape == want.shape and want.std() > .3
    assert (got - want).abs().max() < 1e-4                                    # NaN is not less


cases = [(name, backend, size) for name in MODELS for backend in BACKENDS for size in (4, 16)
         if not (name == 'gpt2, other sizes' and backend == 'numba')]         # whose heads are too small for it


@pytest.mark.parametrize('name, backend, size', cases)
def test_logits(made, name, backend, size):
    model, folder = made(name)
    config, weights = load(folder)
    assert config.sliding_window == WINDOWS.get(name) and weights.keys() == weight_shapes(config).keys()
    pool = Pool(Decoder(config, weights), size, BACKENDS[backend])
    a, b, c = texts(3)
    want = [logits_of(model, x) for x in (a, b, c)]

    same(pool.feed({'whole': a})['whole'], want[0])
    chunks = [pool.feed({'chunks': piece})['chunks'] for piece in np.split(a, [1, 2, 9, 33, 66, 67])]
    same(torch.cat(chunks), want[0])
    decoded = [pool.feed({'decoded': piece})['decoded'] for piece in np.split(b, [60, *range(61, 100)])]
    same(torch.cat(decoded), want[1])
    pool.preempt('whole')

    pool.feed({'old': a[:70]}); pool.feed({'middle': b[:5]})                  # a batch of a decode, a prompt's second piece and a prompt
    mixed = pool.feed({'middle': b[5:40], 'old': a[70:71], 'new': c[:25]})
    same(mixed['middle'], want[1][5:40]); same(mixed['old'], want[0][70:71]); same(mixed['new'], want[2][:25])

    pool.preempt('middle')                                                    # and all of it again, in one chunk
    again = pool.feed({'old': a[71:72], 'middle': b[:32]})
    same(again['middle'], want[1][:32]); same(again['old'], want[0][71:72])

    pool.share('middle', 'hit', 32 // size)                                   # c continues what b began, without computing it
    expected = logits_of(model, np.concatenate([b[:32], c]))[32:]
    got = [pool.feed({'hit': piece, 'middle': b[32 + i:33 + i]}) for i, piece in enumerate(np.split(c, [7, 8, 50]))]
    same(torch.cat([g['hit'] for g in got]), expected)
    same(torch.cat([g['middle'] for g in got]), want[1][32:36])
    assert bool(pool.given_back) == (config.sliding_window is not None)
    for s in list(pool.tables): pool.preempt(s)
    assert sorted(pool.free) == list(range(120))


@pytest.mark.parametrize('name', ['mistral', 'qwen2', 'qwen3', 'gpt2', 'opt'])
def test_served(made, name):
    "Through the engine, with cut prompts, forks, and preemptions both ways: every logit that is sampled from."
    model, folder = made(name)
    decoder = Decoder(*load(folder))
    rng = np.random.default_rng(2)
    requests = [Request(str(i), rng.integers(0, VOCAB, length), SamplingParams(seed=i, n=3 if i in (2, 5) else 1, max_tokens=16))
                for i, length in enumerate([1, 90, 7, 33, 12, 40])]
    for preemption in 'recompute', 'swap':
        run = serve(decoder, requests, 40, 5, 100, seats=16, budget=24, preemption=preemption, make_sampler=CapturingSampler)
        assert getattr(run.done, preemption) and run.done.pieces > 5 and run.done.copies and run.done.forks >= 4
        worst, count = compare(model, run)
        assert worst < 1e-4 and count == 16 * 10


@pytest.mark.parametrize('name', ['qwen3', 'opt', 'mistral'])
def test_bfloat16(made, name):
    "No further from float32 than transformers in bfloat16 is."
    import transformers
    model, folder = made(name)
    text = texts(1)[0]
    exact = logits_of(model, text)
    theirs = logits_of(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), text)
    pool = Pool(Decoder(*load(folder, 'bfloat16')), 16, paged_attention)
    ours = torch.cat([pool.feed({0: piece})[0] for piece in np.split(text, [40, 41, 90])])
    assert pool.kv.dtype == torch.bfloat16 and (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize('name', ['mistral', 'qwen3', 'gpt2', 'opt'])
def test_llm(made, name, tmp_path):
    "A folder, as it is, into `LLM`: what it says greedily is what transformers would have said."
    from pagedlm.serving.llm import LLM
    from test_detokenizer import byte_tokenizer
    model, folder = made(name)
    tokenizer, path = byte_tokenizer([b'the', b'and', b'ing']), tmp_path / 'model'
    assert tokenizer.vocab_size == VOCAB
    shutil.copytree(folder, path)
    tokenizer.raw.save(str(path / 'tokenizer.json'))
    (path / 'tokenizer_config.json').write_text('{"eos_token": "<|end|>"}')
    llm = LLM(str(path), block_size=4, num_blocks=120, max_num_seqs=4, max_num_batched_tokens=16)
    prompts = ['Where the rivers meet, and the road ends', 'o', 'Nothing is lost in moving']
    for out in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False):
        new = out.outputs[0].token_ids
        logits = logits_of(model, [*out.prompt_token_ids, *new])[len(out.prompt_token_ids) - 1:-1]
        assert len(new) == 20 and (logits.amax(1) - logits[torch.arange(20), new]).max() < 1e-3


def test_first_gpt2_files(made, tmp_path):
    "They have no prefix before the names, and causal masks among the weights."
    _, folder = made('gpt2')
    tensors = {n.removeprefix('transformer.'): t for n, t in load_file(folder / 'model.safetensors').items()}
    for i in range(3): tensors |= {f'h.{i}.attn.bias': torch.ones(1, 1, 8, 8), f'h.{i}.attn.masked_bias': torch.tensor(-1e4)}
    save_file(tensors, tmp_path / 'model.safetensors')
    config = json.loads((folder / 'config.json').read_text())
    del config['tie_word_embeddings'], config['n_inner'], config['architectures']                  # 2019: said by saying nothing
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (old, weights), (new, expected) = load(tmp_path), load(folder)
    assert old == new and weights.keys() == expected.keys() and all(torch.equal(weights[n], t) for n, t in expected.items())


def test_names_are_the_files_own(made):
    "What is read is what transformers wrote: each type's own names, of which Llama's decoder knows none."
    for name, some in {'gpt2': 'transformer.h.0.attn.c_attn.weight', 'opt': 'model.decoder.layers.0.fc1.weight',
                       'qwen3': 'model.layers.0.self_attn.q_norm.weight', 'qwen2': 'model.layers.0.self_attn.q_proj.bias'}.items():
        with safe_open(made(name)[1] / 'model.safetensors', 'pt') as f: assert some in f.keys()


@pytest.mark.parametrize('name, change, why', [
    ('opt', dict(do_layer_norm_before=False), 'do_layer_norm_before'),
    ('opt', dict(word_embed_proj_dim=48), 'word_embed_proj_dim'),
    ('opt', dict(_remove_final_layer_norm=True), '_remove_final_layer_norm'),
    ('opt', dict(layer_norm_elementwise_affine=False), 'layer_norm_elementwise_affine'),
    ('opt', dict(activation_function='tanh'), "activation 'tanh'.*silu, relu, gelu"),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx'),
    ('gpt2', dict(scale_attn_weights=False), 'scale_attn_weights'),
    ('gpt2', dict(add_cross_attention=True), 'add_cross_attention'),
    ('gpt2', dict(n_embd=None), 'lacks n_embd'),
    ('mistral', dict(sliding_window=0), 'at least 1'),
    ('mistral', dict(layer_types=['full_attention'] * 3), 'layer_types'),
    ('mistral', dict(architectures=['MixtralForCausalLM'], model_type='mixtral'), 'Mixtral.*MistralForCausalLM.*OPTForCausalLM'),
    ('mistral', dict(rope_parameters=dict(rope_type='yarn', factor=2.0)), 'yarn'),
    ('qwen2', dict(layer_types=['sliding_attention'] * 3), 'sliding_window'),
    ('qwen2', dict(layer_types=['full_attention'] * 2), 'each of 3 layers'),
    ('qwen3', dict(layer_types=['chunked_attention'] * 3), 'chunked_attention'),
    ('qwen3', dict(quantization_config=dict(quant_method='fp8')), 'quantization_config'),
    ('llama', dict(architectures=None, model_type='llama4'), 'llama4.*LlamaForCausalLM')])
def test_refused(made, tmp_path, name, change, why):
    "What would be computed wrongly is not computed at all."
    _, folder = made(name)
    shutil.copy(folder / 'model.safetensors', tmp_path)
    (tmp_path / 'config.json').write_text(json.dumps(json.loads((folder / 'config.json').read_text()) | change))
    with pytest.raises(ConfigError, match=why): load(tmp_path)


def test_silence_means_what_transformers_means():
    "A config.json may leave out what is usual for its type."
    import transformers
    sizes = dict(vocab_size=50, hidden_size=128, intermediate_size=32, num_hidden_layers=2, num_attention_heads=32)
    for kind, row in MODEL_TYPES.items():
        said = {row.names.get(k, k): n for k, n in sizes.items()}
        full = transformers.AutoConfig.for_model(kind, **said).to_dict()
        assert ModelConfig.from_hf(full) == ModelConfig.from_hf(dict(model_type=kind, **said)), kind
    for kind in 'qwen2', 'qwen3':
        slides = lambda use: ModelConfig.from_hf(sizes | dict(model_type=kind, sliding_window=9, max_window_layers=0, use_sliding_window=use))
        assert slides(False).sliding_window is None and slides(True).layer_windows == (9, 9)


@pytest.mark.parametrize('backend', BACKENDS)
def test_blocks_that_fell_out_are_not_read(backend):
    "Neither their table entries nor their slots, for chunks of any size; and the cases are such that it would be noticed."
    rng, gone = np.random.default_rng(0), 0
    for i in range(24):
        window, size = int(rng.choice([1, 2, 7, 16, 40])), int(rng.choice([1, 4, 16, 32]))
        starts = rng.integers(0, 200, 4)
        case = make_case([(s, s + int(n)) for s, n in zip(starts, rng.choice([1, 1, 3, 70], 4))], block_size=size, window=window, seed=i)
        assert ((case.meta.block_tables[:, 0] == GONE).numpy() == (starts - window + 1 >= size)).all()
        gone += int((starts - window + 1 >= size).sum())
        check(BACKENDS[backend], case)
    assert gone > 20


def test_layer_windows_must_fit():
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=32)
    assert ModelConfig(**sizes).sliding_window is None and ModelConfig(**sizes, layer_windows=(8, 8)).sliding_window == 8
    assert ModelConfig(**sizes, layer_windows=(None, 8)).sliding_window is None
    for wrong in dict(layer_windows=(8,)), dict(layer_windows=(8, 0)), dict(layer_windows=(8, '8')), dict(norm='batch'), dict(activation='tanh'):
        with pytest.raises(ConfigError): ModelConfig(**sizes, **wrong)
    config = ModelConfig(**sizes, norm='layer', rope=None, gated=False)
    weights = random_weights(config)
    del weights['model.layers.1.input_layernorm.bias']
    with pytest.raises(ConfigError, match='lack model.layers.1.input_layernorm.bias'): Decoder(config, weights)
