"""``triolet bench``: ask a server a lot, and say how it did."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import httpx2
import trio

from triolet.client.bench import Endpoint, Run, Target, prepare
from triolet.client.client import Client, api_root, connect
from triolet.client.load import Load, Scale
from triolet.client.report import Report
from triolet.errors import NotFoundError, TrioletError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from triolet.client.figures import RequestResult

#: As shells report a process that Ctrl-C ended.
EXIT_INTERRUPTED = 130
EXIT_FAILED = 1
#: Of a closed loop: enough that a server must batch.
DEFAULT_CONCURRENCY = 8


def run(given: Mapping[str, Any]) -> int:
    """Measure as the command line says; the process's exit code.

    Raises:
        TrioletError: The server could not be asked at all.
        click.BadParameter: The options do not go together.
    """
    order = read_order(given)
    session = Session(order)
    trio.run(run_session, session)
    report = session.report()
    if report is None:
        return EXIT_INTERRUPTED
    click.echo(report.table(), nl=False)
    if order.json_path is not None:
        order.json_path.write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
    if report.stopped:
        return EXIT_INTERRUPTED
    return 0 if any(result.completed for result in report.results) else EXIT_FAILED


@attrs.frozen
class Order:
    """The command line, read."""

    url: str
    api_key: str | None
    headers: dict[str, str]
    model: str | None
    endpoint: Endpoint
    load: Load
    warmup: int
    #: ``None``: to be measured.
    scale: Scale | None
    fields: dict[str, object]
    timeout_s: float | None
    json_path: Path | None


@attrs.define(eq=False)
class Session:
    """One run of the command, as far as it has come."""

    order: Order
    #: In place of sockets.
    transport: httpx2.AsyncBaseTransport | None = None
    target: Target | None = attrs.field(default=None, init=False)
    run: Run | None = attrs.field(default=None, init=False)
    client_cpu: float = attrs.field(default=0.0, init=False)
    finished: bool = attrs.field(default=False, init=False)

    async def measure(self) -> None:
        """Do it all.

        Raises:
            TrioletError: The server could not be asked at all.
        """
        order = self.order
        async with connect(
            order.url, api_key=order.api_key, headers=order.headers, transport=self.transport
        ) as client:
            model = order.model or await _first_model(client)
            endpoint = order.endpoint
            self.target = target = Target(client, model, endpoint, order.fields, order.timeout_s)
            self.run = await prepare(
                target, order.load, scale=order.scale, warmup=order.warmup, on_result=self._tell
            )
            wall_s, cpu_s = time.monotonic(), time.process_time()
            try:
                await self.run.run()
                self.finished = True
            finally:
                took_s = max(time.monotonic() - wall_s, 1e-9)
                self.client_cpu = (time.process_time() - cpu_s) / took_s

    def report(self) -> Report | None:
        """What there is to report; ``None`` before the first request that counts."""
        if self.run is None or self.target is None:
            return None
        order = self.order
        return Report(
            url=api_root(order.url),
            model=self.target.model,
            endpoint=order.endpoint,
            load=order.load,
            results=self.run.results,
            client_cpu=self.client_cpu,
            stopped=not self.finished,
        )

    def _tell(self, _: RequestResult) -> None:
        if self.run is None or not sys.stderr.isatty():
            return
        results = self.run.results
        failed = sum(not result.completed for result in results)
        line = f"\r{len(results)}/{self.order.load.requests} requests, {failed} not completed"
        end = "\n" if len(results) == self.order.load.requests else ""
        click.echo(line + end, nl=False, err=True)


async def run_session(session: Session) -> None:
    """Measure until it is done or Ctrl-C is pressed.

    Raises:
        TrioletError: The server could not be asked at all.
    """
    failure = None
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, signals, nursery.cancel_scope)
            try:
                await session.measure()
            except TrioletError as error:  # out of the nursery without its group
                failure = error
            nursery.cancel_scope.cancel(reason="the run is over")
    if failure is not None:
        raise failure


async def _stop_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel(reason="Ctrl-C")


async def _first_model(client: Client) -> str:
    models = await client.models()
    if not models:
        raise NotFoundError("The server lists no model: name one with --model.")
    return models[0]


def read_order(given: Mapping[str, Any]) -> Order:
    """Make sense of the options, or raise click.BadParameter."""
    try:
        api_root(given["url"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="URL") from None
    at_once = given["concurrency"]
    if at_once is None and given["rate"] is None:
        at_once = DEFAULT_CONCURRENCY
    if given["shared_prefix"] >= given["input_len"]:
        raise click.BadParameter("must be less than --input-len.", param_hint="--shared-prefix")
    json_path = given["json_path"]
    if json_path is not None and not json_path.parent.is_dir():
        # Not after the run, whose figures would be lost.
        raise click.BadParameter(f"{json_path.parent} is no folder.", param_hint="--json")
    return Order(
        url=given["url"],
        api_key=given["api_key"],
        headers=given["headers"],
        model=given["model"],
        endpoint=given["endpoint"],
        load=Load(
            requests=given["requests"],
            concurrency=at_once,
            rate=given["rate"],
            burstiness=given["burstiness"],
            input_len=given["input_len"],
            shared_prefix=given["shared_prefix"],
            output_len=given["output_len"],
            seed=given["seed"],
        ),
        warmup=given["warmup"],
        scale=None if given["calibrate"] else Scale(),
        fields={
            "temperature": given["temperature"],
            **({"ignore_eos": True} if given["ignore_eos"] else {}),
            **given["extra_body"],
        },
        timeout_s=given["timeout"],
        json_path=json_path,
    )
