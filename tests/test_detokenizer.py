"Text as it streams: any bytes, any stop strings, and the default model's own tokenizer beside transformers'."
import string

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pagedlm.core import SamplingParams
from pagedlm.serving.detokenizer import StopStrings, StreamDecoder, Tokenizer, _bytes_of_chars

TEXTS = ['Hello, world!', 'The capital of France is Paris.', 'def f(x):\n\treturn [y**2 for y in x]  # ok\n', '  two  spaces  ', '\n\n\n',
         'naïve café Ärger', '你好，世界。これは日本語です', '안녕하세요', '👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈🇩🇪', 'مرحبا بالعالم', '🙂' * 20, 'e\u0301\u200d\ufeff', '<|im_start|>user\nhi<|im_end|>\n',
         '1234567890.00', string.printable, '\x00\x01\x7f', '\ufffd', '']
ZWJ = '👩‍🚀'.encode()


def byte_tokenizer(words):
    "A byte-level tokenizer with these byte strings as tokens, after the 256 single bytes."
    from tokenizers import Tokenizer as Raw, decoders, models
    of_byte = {b: c for c, b in _bytes_of_chars().items()}
    names = dict.fromkeys(''.join(of_byte[b] for b in w) for w in [bytes([b]) for b in range(256)] + words)
    raw = Raw(models.BPE({name: i for i, name in enumerate(names)}, []))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(['<|end|>', '<|é |>'])
    return Tokenizer(raw, {'eos_token': '<|end|>'})


def oracle(text, stops, include):
    "Where reading one character after the other would stop."
    for n in range(1, len(text) + 1):
        ends = [s for s in stops if text[:n].endswith(s)]
        if ends: return text[:n] if include else text[:n - max(map(len, ends))]
    return text


pieces = st.one_of(st.binary(min_size=1, max_size=5), st.text('aé你😀', min_size=1, max_size=2).map(str.encode),
                   st.integers(0, 9).map(lambda i: ZWJ[i:i + 4]))


@settings(max_examples=400, deadline=None)
@given(words=st.lists(pieces, min_size=1, max_size=20), data=st.data())
def test_stream_equals_decode(words, data):
    "Whatever the bytes, whatever the stop strings: the pieces add up to the decoded text, cut where the oracle cuts it."
    tokenizer = byte_tokenizer(words)
    top = tokenizer.vocab_size + 2                                       # two ids that nobody has
    ids = data.draw(st.lists(st.one_of(st.integers(250, top), st.integers(0, top)), max_size=30))
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    text = tokenizer.decode(ids, skip)
    stops = [text[i:i + n] for i, n in data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=3))]
    params = SamplingParams(stop=[s for s in stops if s], skip_special_tokens=skip, include_stop_str_in_output=include)
    decoder, want, shown = StreamDecoder(tokenizer, params), oracle(text, params.stop, include), ''
    for i in ids:
        shown += decoder.push([i])
        assert want.startswith(shown)                                    # nothing shown is ever taken back
    assert shown + decoder.finish() == decoder.text == want
    assert decoder.stopped is None or decoder.stopped in params.stop


@settings(max_examples=300, deadline=None)
@given(text=st.text('ab', max_size=30), stops=st.lists(st.text('ab', min_size=1, max_size=8), min_size=1, max_size=4),
       cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_stop_strings_equal_oracle(text, stops, cuts, include):
    stop, shown, cuts = StopStrings(stops, include), '', sorted(cuts)
    for a, b in zip([0] + cuts, cuts + [len(text)]): shown += stop.feed(text[a:b])
    assert shown + stop.flush() == oracle(text, stops, include)


def test_vllm_3574():
    "A stop string over three tokens, streamed: nothing of it appears."
    tokenizer = byte_tokenizer([b'ABC', b'DEF', b'G', b'HIJ', b'KLM'])
    ids = [tokenizer.raw.token_to_id(t) for t in ('ABC', 'DEF', 'G', 'HIJ', 'KLM')]
    decoder = StreamDecoder(tokenizer, SamplingParams(stop='DEFGHIJ'))
    assert [decoder.push([i]) for i in ids] == ['ABC', '', '', '', ''] and decoder.finish() == ''
    assert decoder.stopped == 'DEFGHIJ' and decoder.num_tokens == 4
    decoder = StreamDecoder(tokenizer, SamplingParams(stop='DEFGHIJ', min_tokens=4))
    assert decoder.push(ids) + decoder.finish() == 'ABCDEFGHIJKLM' and decoder.stopped is None


def test_byte_fallback_and_first_space():
    "A SentencePiece-like tokenizer: the first space is stripped, unknown characters are spelled in bytes."
    from tokenizers import Tokenizer as Raw, decoders, models, normalizers
    vocab = ['<unk>', '<s>', '▁', 'a', 'b', '▁a', '▁b', 'ab', '▁ab', '你'] + [f'<0x{b:02X}>' for b in range(256)]
    raw = Raw(models.BPE({w: i for i, w in enumerate(vocab)}, [('▁', 'a'), ('▁', 'b'), ('a', 'b'), ('▁a', 'b')],
                         unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    raw.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    raw.add_special_tokens(['<s>'])
    tokenizer = Tokenizer(raw)
    for text in TEXTS + ['ab ab 👩‍🚀 ab你é ', ' a  b']:
        ids = tokenizer.encode(text)
        decoder = StreamDecoder(tokenizer)
        shown = [decoder.push([i]) for i in ids] + [decoder.finish()]
        assert ''.join(shown) == tokenizer.decode(ids) == text and (text == '\ufffd' or '\ufffd' not in ''.join(shown))
        decoder = StreamDecoder(tokenizer, prompt_ids=tokenizer.encode('ab'))
        assert decoder.push(ids) + decoder.finish() == (' ' + text if ids else '')  # after a prompt the space counts


def test_default_tokenizer_equals_transformers(model_path):
    transformers = pytest.importorskip('transformers')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(model_path), Tokenizer.from_folder(model_path)
    assert ours.eos_token_ids == (theirs.eos_token_id,) and ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        for skip in True, False:
            want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            decoder = StreamDecoder(ours, SamplingParams(skip_special_tokens=skip))
            shown = [decoder.push([i]) for i in ids] + [decoder.finish()]
            assert ''.join(shown) == ours.decode(ids, skip) == want
            assert '\ufffd' in text or not any('\ufffd' in s for s in shown)
    assert ours.encode_batch(TEXTS) == [ours.encode(t) for t in TEXTS]
    turns = [{'role': 'user', 'content': ' Hi <b> "你好" '}, {'role': 'assistant', 'content': 'Hello.'}, {'role': 'user', 'content': 'Bye'}]
    for messages in turns[:1], turns, [{'role': 'system', 'content': 'Be brief.'}] + turns:
        for prompt in True, False:
            want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.chat(messages, add_generation_prompt=prompt) == want
