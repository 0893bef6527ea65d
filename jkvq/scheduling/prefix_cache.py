"""Stored prompts that others may begin with: chunks by their tokens, least recently used out first.

A chunk's keys and values depend on it and on all before it, for prompts are cut at the same places
in whatever company. So a chunk is named by all tokens up to its end, and whoever begins with those
reads its pages instead of making them again. With windows the end of a chunk has a *tail*: the
pages of them (window.py) that a reader there still needs. They are kept beside the packed pages,
and are the first to go.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jkvq.scheduling.page_pool import PagePool

Tail = Sequence[Mapping[int, int]]  # of each window


@dataclass(eq=False)
class Entry:
    """A chunk: the pages that it adds to those of its parent, by their numbers in a sequence."""

    name: bytes
    parent: "Entry | None"
    packed: Mapping[int, int]
    tail: Tail | None  # all that a reader needs there; None when it is gone
    children: int = field(default=0)


class PrefixCache:
    """Owns pages of all pools for chunks that nobody may be reading now."""

    def __init__(self, packed: PagePool, windows: Sequence[PagePool], *, grows: bool = False):
        """``grows``: who goes on from a chunk's end still writes codes into the chunk's pages."""
        self._packed, self._windows, self._grows = packed, windows, grows
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the oldest first
        self._tails: OrderedDict[bytes, Entry] = OrderedDict()
        # One for each page is plenty; some have none, if windows have all of their tokens.
        self._most = sum(pool.pages for pool in (packed, *windows))
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, names: Sequence[bytes]) -> list[Entry]:
        """The longest chain of these chunks that a prompt can go on from; counts as a use."""
        chain = []
        for name in names:
            if name not in self._entries:
                break
            chain.append(self._entries[name])
        while chain and chain[-1].tail is None:
            chain.pop()
        for entry in reversed(chain):  # so that a chunk is never older than those after it
            self._entries.move_to_end(entry.name)
        if chain:
            self._tails.move_to_end(chain[-1].name)
        return chain

    def add(self, names: Sequence[bytes], packed: Mapping[int, int], tail: Tail) -> None:
        """Keeps the last of these chunks, of whose pages all are given; its parents are kept."""
        name = names[-1]
        known = self._entries.get(name)
        if known is not None:
            if known.tail is None:
                self._keep_tail(known, tail)
            return
        parent = self._entries.get(names[-2]) if len(names) > 1 else None
        if len(names) > 1 and parent is None:
            return  # evicted meanwhile: nobody would find this one
        held, above = set(), parent
        while above is not None:
            if self._grows and any(packed[number] != page for number, page in above.packed.items()):
                return  # the codes that this one's readers need are in the sequence's own pages
            held.update(above.packed)
            above = above.parent
        own = {number: page for number, page in packed.items() if number not in held}
        entry = Entry(name, parent, own, None)
        self._packed.keep(own.values())
        self._entries[name] = entry
        if parent is not None:
            parent.children += 1
        for each in reversed([self._entries[name] for name in names]):
            self._entries.move_to_end(each.name)
        self._keep_tail(entry, tail)
        while len(self._entries) > self._most:
            self._evict(next(iter(self._entries.values())))

    def _keep_tail(self, entry: Entry, tail: Tail) -> None:
        entry.tail = tail
        for pool, pages in zip(self._windows, tail, strict=True):
            pool.hold(pages.values())
        self._tails[entry.name] = entry

    def make_room(self, pages: int) -> bool:
        """Lets go of chunks until so many packed pages are free; of none if that is not enough."""
        if self._packed.free >= pages:  # as nearly always, and there may be many chunks
            return True
        if self._packed.free + self._packed.idle < pages:
            return False
        # A chunk that others read goes only where it keeps one before it, which is read from
        # another copy, from being let go of.
        for in_use in (False, True):
            for entry in list(self._entries.values()):
                if self._packed.free >= pages:
                    return True
                if not entry.children and (in_use or not self._is_in_use(entry)):
                    self._evict(entry)
        return self._packed.free >= pages

    def _is_in_use(self, entry: Entry) -> bool:
        pages = entry.packed.values()
        return bool(pages) and all(self._packed.owners(page) > 1 for page in pages)

    def make_window_room(self, pool: PagePool) -> None:
        """Lets go of tails until a page of a window's pool is free, if that is possible."""
        while not pool.free and self._tails:
            self._drop_tail(next(iter(self._tails.values())))

    def clear(self) -> None:
        """Lets go of everything."""
        for entry in list(self._entries.values()):
            self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        self._drop_tail(entry)
        self._packed.let_go(entry.packed.values())
        del self._entries[entry.name]
        if entry.parent is not None:
            entry.parent.children -= 1
        self.evicted += 1

    def _drop_tail(self, entry: Entry) -> None:
        if entry.tail is not None:
            for pool, pages in zip(self._windows, entry.tail, strict=True):
                pool.drop(pages.values())
            entry.tail = None
            del self._tails[entry.name]
