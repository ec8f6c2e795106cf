"""Instructions as the numbers that a language model was trained on, from a local file; nothing is downloaded.

`tokenizer.model` is read with sentencepiece (PaliGemma: pi0, pi0.5), `tokenizer.json` with tokenizers
(SmolVLM2 and others). A model with fresh words needs no file: `words:N` hashes every word into N numbers, as
the small policies do.
"""

import hashlib
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import read_json, write_bytes

FILES = ("tokenizer.model", "tokenizer.json")
RESERVED = 3  # numbers of `words:N` that no word has: padding, end, begin, as PaliGemma has them
BINS = 256  # of a state in words
LARGEST = 1 << 28  # bytes of a tokeniser's file


class Tokeniser:
    """text -> numbers. `name` of its file (or words:N), its `digest` (SHA-256), its `size`: numbers are 0 ..
    size - 1.

    A sentencepiece model begins every prompt with its begin token; a tokenizer.json says by itself what it
    adds.
    """

    def __init__(self, name: str, data: bytes, size: int, encode: Callable[[str], list[int]]):
        self.name, self.data, self.size = name, data, size
        self.digest = hashlib.sha256(data or name.encode()).hexdigest()
        self._encode, self._known = encode, dict[str, list[int]]()

    def encode(self, text: str) -> list[int]:
        """Numbers of a text, those that begin it included."""
        if (ids := self._known.get(text)) is None:
            if len(self._known) > 4096:  # a prompt that tells the state is never asked for twice
                self._known.clear()
            ids = self._known[text] = self._encode(text)
        return ids

    def save(self, folder: Path) -> None:
        """Write its file, where it has one, into `folder`."""
        if self.data:
            write_bytes(folder / self.name, self.data)


def check_words(words: Tokeniser, vocabulary: int) -> None:
    """UserError: more tokens than a model has words for (0: any number)."""
    if vocabulary and words.size > vocabulary:
        raise UserError(
            f"wrong tokeniser: {words.name} has {words.size} tokens, the model has words for {vocabulary}; "
            "give the one that it was trained with"
        )


def load(where: "str | Path") -> Tokeniser:
    """The tokeniser in a file, in a folder that has one, or `words:N`. UserError: there is none, or it cannot
    be read."""
    text = str(where)
    if text.startswith("words:"):
        if not text[6:].isdecimal() or int(text[6:]) <= RESERVED:
            raise UserError(f"words:N needs N > {RESERVED} numbers, got {text!r}")
        return _words(int(text[6:]))
    path = Path(where)
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).is_file()]
        if not found:
            raise UserError(
                f"{path} has no tokeniser ({' or '.join(FILES)}); copy {_named_in(path)} into it, or name it "
                "by --policy.words FILE"
            )
        path = found[0]
    if not path.is_file():
        raise UserError(f"no tokeniser at {path}; give a {' or a '.join(FILES)}, or a folder that has one")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} has {path.stat().st_size} bytes, more than any tokeniser ({LARGEST})")
    data = path.read_bytes()
    return (_json if path.suffix == ".json" else _sentencepiece)(path, data)


def _named_in(folder: Path) -> str:
    """The tokeniser that a folder of LeRobot names on the hub and does not have."""
    file = folder / "policy_preprocessor.json"
    said = read_json(file).get("steps") if file.is_file() else None
    for step in said if isinstance(said, list) else ():
        named = isinstance(step, dict) and step.get("registry_name") == "tokenizer_processor"
        if named and (name := (step.get("config") or {}).get("tokenizer_name")):
            return f"that of {name}, which its preprocessor names,"
    return "the one of the model"


def pieces_of(text: str) -> list[str]:
    """The words of `words:N` that a text has."""
    return re.findall(r"\w+|[^\w\s]|\n", text.lower())


def own_numbers(words: Tokeniser) -> range:
    """The tokens of `words:N` that are the bins of a state, in their order; none in other tokenisers, or
    where N is small."""
    return range(RESERVED, RESERVED + _own(words.size) if words.name.startswith("words:") else RESERVED)


def told_words(words: Tokeniser, template: str) -> list[int]:
    """The tokens that are neither reserved nor in the prompt whatever is asked for: those of an
    instruction."""
    always = words.encode(template.format(task="", state=" ".join(map(str, range(-1, BINS))), pictures=""))
    return sorted(set(range(RESERVED, words.size)) - set(always))


def _own(size: int) -> int:
    return BINS if size - RESERVED >= 1.5 * BINS else 0


def _words(size: int) -> Tokeniser:
    """Numbers up to 255, the bins of a state in a prompt, have places of their own where there are as many
    others: two that shared one would be one state."""
    own = _own(size)
    first = RESERVED + own

    def encode(text: str) -> list[int]:
        return [
            RESERVED + int(w)
            if w.isdecimal() and len(w) <= 3 and int(w) < own
            else first + zlib.crc32(w.encode()) % (size - first)
            for w in pieces_of(text)
        ]

    return Tokeniser(f"words:{size}", b"", size, encode)


def _sentencepiece(path: Path, data: bytes) -> Tokeniser:
    try:
        import sentencepiece
    except ImportError:
        raise MissingDependency(f"{path} needs sentencepiece: pip install 'robo_rl[vla]'") from None
    pieces = sentencepiece.SentencePieceProcessor()
    try:
        pieces.LoadFromSerializedProto(data)
    except RuntimeError as e:
        raise UserError(
            f"{path} is no sentencepiece model ({str(e).splitlines()[0]}); copy it again, and not a Git LFS "
            "pointer"
        ) from None
    begin = [pieces.bos_id()] if pieces.bos_id() >= 0 else []
    return Tokeniser(
        "tokenizer.model", data, pieces.vocab_size(), lambda text: begin + pieces.EncodeAsIds(text)
    )


def _json(path: Path, data: bytes) -> Tokeniser:
    try:
        import tokenizers
    except ImportError:
        raise MissingDependency(f"{path} needs tokenizers: pip install 'robo_rl[vla]'") from None
    try:
        pieces = tokenizers.Tokenizer.from_buffer(data)
    except Exception as e:  # the library raises a bare Exception
        raise UserError(
            f"{path} is no tokenizer.json ({str(e).splitlines()[0][:120]}); copy it again, and not a Git LFS "
            "pointer"
        ) from None
    pieces.no_padding()
    pieces.no_truncation()
    return Tokeniser("tokenizer.json", data, pieces.get_vocab_size(), lambda text: pieces.encode(text).ids)
