"""Text from a stream of tokens, cut at stop strings."""

from collections.abc import Sequence

from jkvq.models.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what the bytes of half a character decode to
LONGEST = 4  # tokens of a character, of one byte each


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece.

    A piece is held back while it may still be half a character or the beginning of a stop string,
    so that no piece is ever taken back. The pieces add up to the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # where the tokens begin that the next text is decoded with
        self._decoded = 0  # tokens whose text is in _text
        self._text = ""
        self._given = 0
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> int:
        """Takes the next tokens, but those behind a stop string; returns how many it has taken.

        ``stopped`` says whether one was complete. Without stop strings nothing is decoded yet.
        """
        if not self._stop:
            self._tokens += tokens
            return len(tokens)
        before = len(self._tokens), self._context, self._decoded, self._text
        self._tokens += tokens
        self._read_on()
        if not self.stopped or len(tokens) == 1:
            return len(tokens)
        # Which token completed it, and which string: again, one by one
        count, self._context, self._decoded, self._text = before
        del self._tokens[count:]
        self.stopped = False
        for taken, token in enumerate(tokens, 1):
            self.add([token])
            if self.stopped:
                return taken
        return len(tokens)

    def take(self) -> str:
        """The text that is certain and was not given yet."""
        self._read_on()
        return self._give(len(self._text) if self.stopped else len(self._text) - self._held())

    def finish(self) -> str:
        """The rest, once no token follows."""
        if not self.stopped:
            before = self._tokenizer.decode(self._tokens[self._context : self._decoded])
            self._append(self._tokenizer.decode(self._tokens[self._context :])[len(before) :])
        return self._give(len(self._text))

    def _read_on(self) -> None:
        """Decodes what came since, but for the last tokens if they end with half a character."""
        if self.stopped or self._decoded == len(self._tokens):
            return
        before = self._tokenizer.decode(self._tokens[self._context : self._decoded])
        last = len(self._tokens)
        for end in range(last, max(self._decoded, last - LONGEST), -1):
            after = self._tokenizer.decode(self._tokens[self._context : end])
            if len(after) > len(before) and not after.endswith(UNFINISHED):
                self._append(after[len(before) :])
                self._context, self._decoded = self._decoded, end
                return
        if (end := last - LONGEST + 1) > self._decoded:  # no character is as long as all of this
            after = self._tokenizer.decode(self._tokens[self._context : end])
            if len(after) > len(before):
                # Tokens may end within characters one after the other: those are not broken.
                if self._tokenizer.decode(self._tokens[self._context :]).startswith(after):
                    self._append(after[len(before) :])
                    self._context, self._decoded = self._decoded, end
            else:  # special tokens: nothing of them is ever seen
                del self._tokens[self._decoded : end]

    def _append(self, text: str) -> None:
        start = max(0, len(self._text) - max(map(len, self._stop), default=0))
        self._text += text
        cuts = [at for stop in self._stop if (at := self._text.find(stop, start)) >= 0]
        if cuts:
            self._text, self.stopped = self._text[: min(cuts)], True

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0

    def _give(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start:end]
