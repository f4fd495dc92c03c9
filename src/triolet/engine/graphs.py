"""Decode steps recorded once and played again: the GPU then waits for no Python.

Theory of operation. A decode step of a small model is some hundred kernels of a few microseconds
each, and launching them one by one takes the host longer than the GPU takes to run them. A CUDA
graph launches them all at once, with the very addresses and sizes of when it was recorded. So
every recording has a size, a number of rows and of pages per row, and one tensor of numbers that
it reads its step from: ids, positions, slots, lengths, block tables. To play it is to fill that
tensor, in one copy, and to launch. A step is played on the next larger size.

Rule 1. Only steps of which every chunk is one token that is sampled from, and scores no prompt.
Rule 2. Rows beyond the step's are padding: id 0 at position 0 of the dummy page, one more than the
pool was asked for, which the block pool never hands out. They read and write there alone.
Rule 3. The host's copy of the numbers is written only when the last step's ids have been read,
so the transfer from it is over. Whoever gives up a step in between waits for the device first.
Rule 4. Pages that the step opens are cleared before it is played (rule 4 of
:mod:`~triolet.engine.attention`): which ones, and whether any, changes.
Rule 5. Sampling stays outside: it is Python that looks at what each request asks for.
Rule 6. A model that cannot be recorded (one that reads a number back in its forward) is run as
before, and the log says so once.

With the kernel of :mod:`~triolet.engine.varlen`, tables are as wide as the longest sequence may be
and only the number of rows has sizes. Where pages are gathered, a width costs what it could hold,
so widths have sizes too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from triolet.engine.attention import Step
from triolet.engine.transfer import to_device
from triolet.engine.varlen import PagedRows, why_gathered
from triolet.engine.views import DecodeView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triolet.engine.kv import KvPool
    from triolet.engine.plan import Chunk
    from triolet.engine.scores import Scores

logger = logging.getLogger(__name__)

#: Runs a computation and records it: gives its result, and what plays it again into that result.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class CudaCapture:
    """A :data:`Capture` by CUDA graphs. Its recordings share their memory: play one at a time.

    For one set of recordings. Once all of them are gone, torch refuses to use their memory again.

    Args:
        device: The GPU.

    Raises:
        RuntimeError: When called: the computation waits for the device, or cannot be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A handle of torch's, which has no public type.
        self._memory: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run, and look whether it waits, before recording."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side: Any = torch.cuda.Stream  # its constructor has no types
            stream = side()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # What libraries set up at their first call cannot be recorded.
                compute()
                # A recording that fails half-way leaves torch's allocator in disorder. What makes
                # it fail is a wait for the device, and of that torch can tell beforehand.
                with _no_waits():
                    compute()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                    result = compute()
            finally:
                # torch leaves its own stream in place where the recording fails.
                torch.cuda.set_stream(current)
            self._memory = graph.pool()
            return result, graph.replay


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Let torch raise RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class StaticStep(Step):
    """A decode step that reads itself from one tensor, whose numbers may change.

    Args:
        numbers: int32 ``[rows * (4 + width)]`` on the device, laid out as :class:`Recording` says.
        rows: How many sequences.
        width: How many pages each of them may have.
        pool: Where they live.
        kernel: Whether the kernel of :mod:`~triolet.engine.varlen` may be used.
    """

    def __init__(
        self, numbers: Tensor, rows: int, width: int, pool: KvPool, *, kernel: bool
    ) -> None:
        self.pool = pool
        self.layers = set()
        self.order = list(range(rows))
        self.decode_rows = rows
        self._chunks = []
        ids, positions, slots, lengths, tables = numbers.split_with_sizes(
            [rows] * 4 + [rows * width]
        )
        self.input_ids = ids.long().unsqueeze(0)
        self.position_ids = positions.long().unsqueeze(0)
        self.slots = slots.long()
        self.cleared = self.slots[:0]
        self.sampled = torch.arange(rows, device=numbers.device)
        self._lengths, self._tables = lengths, tables
        self._width = width * pool.block_size
        self._views = {}
        #: Whether a layer asked for what the kernel does not compute.
        self.gathered = not kernel
        self._rows = None
        if kernel:
            self._rows = PagedRows(
                starts=torch.arange(rows + 1, device=numbers.device, dtype=torch.int32),
                lengths=lengths,
                tables=tables.view(rows, width),
                most_queries=1,
                most_keys=self._width,
            )

    def attend(
        self,
        fresh: tuple[Tensor, Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        """As :meth:`~triolet.engine.attention.Step.attend`."""
        if self._rows is not None and scores.plain:
            return self._rows.attend(fresh[0], pages, window, scores.scaling)
        self.gathered = True
        return super().attend(fresh, pages, window, scores)

    def _decode_views(self, window: int | None) -> list[DecodeView]:
        # Everything is read and masked: what a row has is not known to the host.
        length = self._lengths[:, None]
        position = torch.arange(self._width, device=length.device)
        hidden = position >= length
        if window is not None:
            hidden |= position < length - window
        mask = self._additive(hidden)[:, None, None]
        rows = slice(0, self.decode_rows)
        return [DecodeView(rows, self._tables, self._width, mask)]


class Recording:
    """One size of decode step: its numbers, here and on the device, and what plays it.

    Columns one after the other: ids, positions, slots and lengths of all rows, then the tables,
    row by row.

    Args:
        rows: How many sequences, the padding included.
        width: How many pages each may have.
        pool: Where they live; its spare page is the padding's.
    """

    def __init__(self, rows: int, width: int, pool: KvPool) -> None:
        self.rows, self.width, self._pool = rows, width, pool
        pinned = pool.device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(rows * (4 + width), dtype=torch.int32, pin_memory=pinned)
        self.numbers = torch.zeros_like(self._host, device=pool.device)
        # NumPy writes single numbers several times as fast as torch.
        flat = self._host.numpy()
        self._columns = flat[: 4 * rows].reshape(4, rows)
        self._tables = flat[4 * rows :].reshape(rows, width)
        self._known: list[tuple[int, ...]] = [()] * rows
        for row in range(rows):
            self._pad(row)
        self._used = 0
        #: ``[rows, vocabulary]``, written when the recording is played.
        self.logits: Tensor | None = None
        self.play: Callable[[], None] | None = None

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Put a step in place: row ``i`` is chunk ``i``. Does not wait for the device."""
        size = self._pool.block_size
        for row, chunk in enumerate(chunks):
            start = chunk.start
            slot = chunk.blocks[start // size] * size + start % size
            self._columns[:, row] = (chunk.token_ids[0], start, slot, start + 1)
            self._write_table(row, chunk.blocks[: start // size + 1])
        for row in range(len(chunks), self._used):
            self._pad(row)
        self._used = len(chunks)
        self.numbers.copy_(self._host, non_blocking=True)

    def _pad(self, row: int) -> None:
        dummy = self._pool.dummy_page
        self._columns[:, row] = (0, 0, dummy * self._pool.block_size, 1)
        self._write_table(row, (dummy,))

    def _write_table(self, row: int, blocks: tuple[int, ...]) -> None:
        # It changes once per page. Behind its last page a row has that page again: gathered and
        # masked it may be, but it is nobody else's.
        if blocks != self._known[row]:
            self._tables[row, : len(blocks)] = blocks
            self._tables[row, len(blocks) :] = blocks[-1]
            self._known[row] = blocks


class DecodeGraphs:
    """The recordings of one pool and model, made when a size is first needed.

    Args:
        compute: Gives the logits ``[R, vocabulary]`` of the tokens ``keep`` of a step.
        pool: Must have its spare page.
        capture: What records, see :data:`Capture`.
        max_rows: Rows of the batch.
        max_pages: Pages that one sequence can have.
    """

    def __init__(
        self,
        compute: Callable[[Step, Tensor], Tensor],
        pool: KvPool,
        *,
        capture: Capture,
        max_rows: int,
        max_pages: int,
    ) -> None:
        self._compute = compute
        self._pool = pool
        self._capture = capture
        self._max_rows, self._max_pages = max_rows, max_pages
        self._kernel = why_gathered(pool) is None
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._impossible = False

    def run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """The logits of a step, ``[len(chunks), vocabulary]``, good until the next one.

        Returns:
            ``None`` where the step has to be run the ordinary way; nothing has changed then.
        """
        if self._impossible or not all(map(_is_decode, chunks)) or len(chunks) > self._max_rows:
            return None
        size = self._pool.block_size
        recording = self._recording(len(chunks), max(c.start for c in chunks) // size + 1)
        if recording is None or recording.play is None or recording.logits is None:
            return None
        opened = [c.blocks[c.start // size] * size for c in chunks if c.start % size == 0]
        slots = [slot for first in opened for slot in range(first + 1, first + size)]
        if slots:
            self._pool.clear(to_device(slots, self._pool.device))
        recording.load(chunks)
        recording.play()
        return recording.logits[: len(chunks)]

    def warm_up(self) -> None:
        """Make the recordings of all numbers of rows, largest first: the others fit its memory."""
        for rows in sorted({_size_of(n, self._max_rows) for n in range(1, self._max_rows + 1)})[
            ::-1
        ]:
            self._recording(rows, 1)

    def _recording(self, rows: int, pages: int) -> Recording | None:
        width = self._max_pages if self._kernel else _size_of(pages, self._max_pages)
        key = _size_of(rows, self._max_rows), width
        if key not in self._recordings and not self._impossible:
            recording, gathered = self._record(*key)
            if gathered and self._kernel:
                # The model asks for what the kernel cannot do: tables no wider than needed.
                self._kernel = False
                return self._recording(rows, pages)
            if recording is not None:
                self._recordings[key] = recording
        return self._recordings.get(key)

    def _record(self, rows: int, width: int) -> tuple[Recording | None, bool]:
        """A new recording, and whether pages are gathered in it though the kernel was there."""
        recording = Recording(rows, width, self._pool)
        recording.load(())
        gathered = False

        def compute() -> Tensor:
            nonlocal gathered
            step = StaticStep(recording.numbers, rows, width, self._pool, kernel=self._kernel)
            logits = self._compute(step, step.sampled)
            gathered = step.gathered
            return logits

        try:
            recording.logits, recording.play = self._capture(compute)
        except RuntimeError as error:
            self._impossible = True
            logger.warning(
                "Decode steps of this model cannot be recorded as CUDA graphs and run one kernel "
                "at a time (%s)",
                type(error).__name__,
            )
            logger.debug("the recording failed", exc_info=True)
            return None, False
        return recording, gathered


def _is_decode(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and chunk.samples and not chunk.scores_prompt


def _size_of(needed: int, most: int) -> int:
    """The next power of two, or the most there can be."""
    return min(1 << (needed - 1).bit_length(), most)
