"""`quire serve`: engine process first, then everything else while it loads."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from quire import __version__
from quire.args import EngineArgs, ServerArgs, comma_list, executor_of
from quire.cli.flags import pick
from quire.cli.start_report import start_up_report
from quire.cli.table import from_table
from quire.engine.spawn import EngineProcess  # light: started before the heavy imports of this process
from quire.errors import ConfigError
from quire.http.listen import LEAST_FILES, raise_file_limit, resolved
from quire.metrics.log import Log
from quire.units import GIB

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.http.takeover import Takeover
    from quire.models.checkpoint import Checkpoint

log = Log("server")
WORTH_SAYING = ("linears", "output matrix", "embedding table")


def serve(settings: dict[str, Any]) -> int:
    """Run the server until a signal; return the exit status."""
    begin = time.monotonic()
    setproctitle("quire: api")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a recording, and nothing has been recorded yet
    engine_args, server_args = pick(EngineArgs, settings), pick(ServerArgs, settings)
    num_replicas = server_args.data_parallel_size or server_args.replicas
    if num_replicas > 1:
        return int(from_table("serve --replicas")(settings, server_args, num_replicas))
    most = engine_args.max_num_seqs + engine_args.max_queue  # requests
    few = raise_file_limit(most * (1 if server_args.journal is None else 2) + LEAST_FILES)
    if few is not None:
        print(f"quire: {few}", file=sys.stderr)
    takeover = connect_takeover(server_args)
    process = EngineProcess(executor_of(engine_args))
    if server_args.log_format == "human":
        print(f"loading  {engine_args.model} …", file=sys.stderr, flush=True)
    try:
        return _serve(engine_args, server_args, process, begin, takeover)
    finally:
        process.close()
        if takeover is not None:
            takeover.close()


def connect_takeover(args: ServerArgs) -> Takeover | None:
    """Connect to the running server of the same address, None without ``--handover``.

    Raises:
        ConfigError: there is none that can be taken over.
    """
    if not args.handover:
        return None
    if not args.port:
        raise ConfigError("--handover needs the --port of the running server.", param="handover")
    from quire.http.takeover import Takeover

    return Takeover.from_address(resolved(args.host, args.port))


def configured(args: EngineArgs, takeover: Takeover | None) -> tuple[EngineConfig, Checkpoint]:
    """Resolve the settings. A server that is taken over keeps its memory until its last request has ended.

    Raises:
        ConfigError: the settings do not fit the model or the machine; or the memory does not hold both engines.
    """
    from quire.device import detect_device
    from quire.engine.assemble import configure

    device = detect_device(args.device)
    if takeover is None:
        return configure(args, device)
    free = device.memory_available_bytes
    if device.kind == "cpu":  # its cache takes memory as it fills
        free = max(0, free - takeover.unclaimed_bytes)
    try:
        return configure(args, replace(device, memory_available_bytes=free))
    except ConfigError as error:
        if error.param != "kv_memory":
            raise
        raise ConfigError(
            f"--handover: memory does not hold both engines: {error}. The running server (process "
            f"{takeover.about['pid']}, up to {takeover.about['engine_bytes'] / GIB:.2f} GiB) goes on.",
            param="kv_memory",
        ) from None


def _serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    process: EngineProcess,
    begin: float,
    takeover: Takeover | None,
) -> int:
    from quire.cli.serve_recorder import supervised, with_recorder
    from quire.device import slow_kernels
    from quire.engine.assemble import load_text
    from quire.engine.process import ProcessClient
    from quire.metrics.log import configure as configure_log

    style: Any = server_args.log_format
    configure_log(server_args.log_level, style=style)
    config, checkpoint = configured(engine_args, takeover)
    config = with_recorder(_with_slo(config, server_args), checkpoint, engine_args, server_args)
    if server_args.check is not None or server_args.max_kl is not None:
        from_table("serve --check")(engine_args, server_args.check, server_args.max_kl)
    child: dict[str, Any] = {"log_level": server_args.log_level, "log_format": style}
    child["executor"] = executor_of(engine_args)
    child["watches_hangs"] = server_args.hang_timeout_s > 0
    if server_args.gateway_key is not None:
        config = replace(config, cache=replace(config.cache, has_events=True))
    first = ProcessClient(config, **child, process=process)
    if server_args.compare_to is not None:
        return int(from_table("serve --compare-to")(first, config, server_args, server_args.compare_to))

    # The child loads the model from here on; this process reads the tokenizer and imports the web server.
    from quire.api.app import create_app
    from quire.api.server import run
    from quire.clock import WallClock
    from quire.engine.frontend import Frontend
    from quire.http.listen import bind, load_tls

    names = comma_list(server_args.served_model_name)
    text = load_text(engine_args, config, checkpoint, names=names, chat_template=server_args.chat_template)
    clock = WallClock()
    golden = golden_prompt(config, server_args.golden_interval_s, clock)
    client = supervised(first, lambda: ProcessClient(config, **child), config, server_args, golden)
    frontend = Frontend(client, text.tokenizer, text.chat_template, text.model, clock, adapters=text.adapters)
    api = api_settings(server_args, config, __version__)

    seen = Announcement(server_args, api, frontend, weights_report(config.model), begin)
    seen.note = slow_kernels(config.device, config.runner.kernels)
    tls = load_tls(server_args.tls_cert, server_args.tls_key)
    sock = bind(server_args.host, server_args.port) if takeover is None else takeover.sockets["api"]
    tracer = make_tracer(server_args.otlp_traces_endpoint, clock, __version__)
    jobs, forecast = jobs_of_server(server_args, frontend), _forecast(config, frontend)
    app = create_app(frontend, api, extension=jobs, tracer=tracer, forecast=forecast)
    admin = admin_listener(app, server_args, takeover)
    ended = nullcontext() if tracer is None else closing(tracer)
    with ended, cockpit_page(server_args, app, sock, admin):
        drain_s, ready, leave = server_args.drain_timeout_s, seen.ready, seen.leave
        return run(
            app, sock=sock, drain_timeout_s=drain_s, on_ready=ready, admin=admin, tls=tls,
            takeover=takeover, on_leave=leave, probe_process=server_args.probe_process,
        )  # fmt: skip


def _with_slo(config: EngineConfig, args: ServerArgs) -> EngineConfig:
    """Return ``config`` with what ``--slo`` asks for."""
    if args.slo is None and args.profile is None:
        return config
    from quire.cli.serve_slo import with_slo

    return with_slo(config, args)


def _forecast(config: EngineConfig, frontend: Any) -> Any:
    """Return the forecast of a request's TTFT, None without ``--slo``."""
    if config.slo is None:
        return None
    from quire.cli.serve_slo import forecast_of

    return forecast_of(config, frontend.stats)


@dataclass(eq=False)
class Announcement:
    """Tells the terminal, and the gateway of ``--gateway``, that the server is ready."""

    _args: ServerArgs
    _api: Any
    _frontend: Any
    _weights: str
    _begin_s: float
    note: str | None = None  # why the kernels are slow

    def ready(self, url: str, info: Any) -> None:
        """The server answers at ``url``."""
        name, seconds = self._frontend.model.names[0], time.monotonic() - self._begin_s
        if (note := open_line(self._args)) is not None:
            print(note, file=sys.stderr, flush=True)
        if self._args.clients:
            from quire.cli.clients import guide

            print(guide(self._args, url, name), file=sys.stderr, flush=True)
        log.debug("kernels", kernels=info.kernels)
        report = start_up_report(
            url, info, self._frontend.model, seconds, self.note, self._weights + self._tools()
        )
        print(f"\n{report}", file=sys.stderr, flush=True)
        self._heartbeat = None
        if self._args.gateway is not None:
            self._heartbeat = make_heartbeat(self._args, self._api, self._frontend, url)
            self._heartbeat.start()

    def _tools(self) -> str:
        """Return the line on the format of tool calls, "" for a model without a chat template."""
        from quire.text.output.generic import describe

        template, format = self._frontend.chat_template, self._args.tool_format
        if not template.names:
            return ""
        return f"tools    {describe(template.source(True)) if format == 'auto' else format}\n"

    def leave(self) -> None:
        """Another server answers there from now on, and tells the gateway."""
        if self._heartbeat is not None:
            self._heartbeat.stop()


def open_line(args: ServerArgs) -> str | None:
    """Return the line of a server that other machines reach without a key."""
    from quire.http.browser_guard import open_note

    has_keys = bool(args.api_key or args.api_key_file)
    address = resolved(args.host, args.port)[0]
    return open_note(address, comma_list(args.allowed_hosts), has_keys=has_keys, option="--api-key")


def api_settings(args: ServerArgs, config: Any, release: str) -> Any:
    """Return the settings of the API."""
    from quire.api.settings import ApiSettings, fingerprint
    from quire.http.browser_guard import allowed_hosts
    from quire.http.refusals import PLACEHOLDERS

    key_file: Any = None
    if args.api_key_file:
        from quire.http.keys import KeyFile

        key_file = KeyFile(Path(args.api_key_file), time.monotonic)
    names: tuple[str, ...] = ()
    if args.clients:
        from quire.cli.clients import model_names

        names = model_names(args.clients)
    return ApiSettings(
        version=__version__,
        system_fingerprint=fingerprint(config, __version__),
        api_keys=(args.api_key,) if args.api_key else (),
        key_file=key_file,
        gateway_key=args.gateway_key,
        cors_origins=comma_list(args.cors_origins),
        allowed_hosts=allowed_hosts(resolved(args.host, args.port)[0], comma_list(args.allowed_hosts)),
        lenient=args.lenient,
        strict_fields=args.strict_fields,
        tool_format=args.tool_format,
        stand_ins=(*PLACEHOLDERS, *names),
        max_body_bytes=args.max_body_mib * 2**20,
        response_store_bytes=args.response_store_mib * 2**20,
        response_dir=Path(args.batch_dir) / "responses" if args.batch_dir else None,
        journal_dir=Path(args.journal) if args.journal else None,
        journal_bytes=args.journal_mib * 2**20,
        model=config.model,
        tokens_at_once=2 * config.scheduler.max_num_batched_tokens,
        cache=config.cache if config.cache.has_events else None,
        shared_cache=config.cache if config.cache.engine_id else None,
        cache_config={  # vLLM's names
            "block_size": config.cache.block_size,
            "num_gpu_blocks": config.cache.num_blocks,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "cache_dtype": config.model.kv_dtype,
        },
    )


def cockpit_page(args: ServerArgs, app: Any, sock: socket.socket, admin: Any) -> Any:
    """Return what runs the page of ``--cockpit`` while it is entered."""
    if not args.cockpit:
        return nullcontext()
    start_page = from_table("serve --cockpit")
    return closing(start_page(app, sock, admin, secure=args.tls_cert is not None))


def golden_prompt(config: Any, interval_s: float, clock: Any) -> Any:
    """Return the check of the engines' answers, None with an interval of 0."""
    if not interval_s:
        return None
    from quire.engine.guard import GoldenPrompt, golden_folder

    return GoldenPrompt(config, golden_folder(), clock, interval_s)


def make_heartbeat(args: ServerArgs, api: Any, frontend: Any, url: str) -> Any:
    """Return what registers this server at ``args.gateway``; a server that drains is taken off there."""
    from quire.http.heartbeat import Heartbeat

    def describe() -> dict[str, Any] | None:
        if frontend.state != "ready":
            return None
        adapters = () if frontend.adapters is None else tuple(frontend.adapters.adapters)
        return {
            "name": f"{socket.gethostname()}:{url.rpartition(':')[2]}",
            "url": url,
            "models": [*frontend.model.names, *adapters],
            "api_key": args.api_key,
            **({"role": args.role} if args.role != "both" else {}),
            "region": args.region or os.environ.get("QUIRE_REGION") or None,
            "about": {
                "pid": os.getpid(),
                "version": __version__,
                "fingerprint": api.system_fingerprint,
                "max_model_len": frontend.model.max_model_len,
                "kv_tokens": frontend.info.num_kv_tokens,
            },
        }

    return Heartbeat(args.gateway or "", args.gateway_key, describe)


def jobs_of_server(args: ServerArgs, frontend: Any) -> Any:
    """Return files, batches and background responses."""
    from quire.api.state import is_busy
    from quire.jobs.routes import JobSettings, jobs_of

    settings = JobSettings(
        batch_dir=args.batch_dir,
        batch_concurrency=args.batch_concurrency,
        max_file_bytes=args.max_file_mib * 2**20,
        max_store_bytes=args.file_store_mib * 2**20,
        max_body_bytes=args.max_body_mib * 2**20,
        lenient=args.lenient,
        strict_fields=args.strict_fields,
    )
    return jobs_of(settings, lambda: is_busy(frontend), time.time, lambda: frontend.state == "ready")


def make_tracer(endpoint: str | None, clock: Any, release: str) -> Any:
    """Return the tracer of requests, None without an endpoint; ConfigError where the extra `otel` is missing."""
    from quire.metrics.trace import RequestTracer

    return None if endpoint is None else RequestTracer.to(endpoint, clock.now, time.time, release)


def admin_listener(app: Any, args: ServerArgs, takeover: Takeover | None = None) -> Any:
    """Bind the admin surface, if the settings ask for one, or take the socket of the server that is taken over."""
    from quire.http.listen import bind_admin, url_of

    key = args.admin_key
    taken = None if takeover is None else takeover.sockets.get("admin")
    bound = bind_admin(
        host=args.admin_host,
        port=args.admin_port,
        path=args.admin_socket,
        has_key=key is not None,
        taken=taken,
    )
    if bound is None:
        return None
    from quire.api.admin import create_admin_app
    from quire.http.browser_guard import allowed_hosts
    from quire.http.drain import SideApp

    sock, path = bound
    print(f"admin    on {path or url_of(sock)}", file=sys.stderr, flush=True)
    hosts = None if path is not None else allowed_hosts(sock.getsockname()[0], comma_list(args.allowed_hosts))
    return SideApp(create_admin_app(app, keys=(key,) if key else (), hosts=hosts), sock, path)


def weights_report(model: Any) -> str:
    """Return lines on the formats of quantized weights and on deviations from the request, each ending in a newline."""
    lines = []
    if model.formats:
        from quire.weight_table import weight_table

        rows = [
            row for row in weight_table(model.spec, model.dtype, model.formats) if row.part in WORTH_SAYING
        ]
        lines = ["weights  " + "; ".join(f"{row.part} {row.held} ({row.bits:.2f} bits)" for row in rows)]
    return "".join(f"{line}\n" for line in (*lines, *(f"         {remark}" for remark in model.remarks)))
