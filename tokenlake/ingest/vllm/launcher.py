"""`tokenlake worker`: vLLM's own server, with capture beside it.

The app, its state and its arguments are vLLM's; three routes of ours are added, and a worker that cannot capture does
not come up. The command takes vLLM's arguments as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

import uvloop
import vllm.envs as vllm_environment
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenlake.errors import ConfigError
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.parent import end_with_parent
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.prompter import Prompter
from tokenlake.ingest.shared_deltas import SharedDeltas
from tokenlake.ingest.vllm.facts import read_facts, read_routing, stop_ids_of
from tokenlake.ingest.vllm.routes import router
from tokenlake.ingest.vllm.template import WorkerTemplate
from tokenlake.ingest.vllm.worker import CaptureWorker
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.format import create_lake, read_lake

__all__ = ["run"]

_REMEMBERED = 65_536
"""Keys of deltas; the gate mints a key for every call, and a worker stages it once."""


def run(arguments: argparse.Namespace) -> int:
    """`tokenlake worker`."""
    cli_env_setup()
    parser: Any = make_arg_parser(FlexibleArgumentParser(prog="tokenlake worker"))
    served: Any = parser.parse_args(arguments.rest)
    if served.model_tag is not None:
        served.model = served.model_tag
    if served.headless or (served.api_server_count or 1) > 1:
        raise ConfigError(
            "a worker is one API server: leave --headless and --api-server-count out, or start more workers"
        )
    configure_logging_from_args(served)
    validate_parsed_serve_args(served)
    create_lake(arguments.lake)
    if arguments.with_parent:
        end_with_parent()
    uvloop.run(_serve(served, arguments))
    return 0


async def _serve(served: Any, arguments: argparse.Namespace) -> None:
    address, listener = setup_server(served, reuse_port=False)
    with contextlib.ExitStack() as held:
        held.callback(listener.close)
        async with build_async_engine_client(served) as engine:
            tasks = await engine.get_supported_tasks()
            app = build_app(served, tasks, engine.model_config)
            await init_app_state(engine, app.state, served, tasks)
            app.state.tokenlake_worker = await _worker(app.state, engine, served, arguments, held)
            app.include_router(router)
            log_config = get_uvicorn_log_config(served)
            print(f"capturing {served.model} into {arguments.lake} at {address}", flush=True)  # noqa: T201
            stopped = await serve_http(
                app,
                sock=listener,
                enable_ssl_refresh=served.enable_ssl_refresh,
                host=served.host,
                port=served.port,
                log_level=served.uvicorn_log_level,
                access_log=not served.disable_uvicorn_access_log,
                timeout_keep_alive=vllm_environment.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
                ssl_keyfile=served.ssl_keyfile,
                ssl_certfile=served.ssl_certfile,
                ssl_ca_certs=served.ssl_ca_certs,
                ssl_cert_reqs=served.ssl_cert_reqs,
                ssl_ciphers=served.ssl_ciphers,
                h11_max_incomplete_event_size=served.h11_max_incomplete_event_size,
                h11_max_header_count=served.h11_max_header_count,
                **({} if log_config is None else {"log_config": log_config}),
            )
        await stopped


async def _worker(
    state: Any, engine: Any, served: Any, arguments: argparse.Namespace, held: contextlib.ExitStack
) -> CaptureWorker:
    """The worker over a vLLM that is up, what it holds in `held`; raises `ConfigError` where it could not capture.

    The lake is opened only now: a process that the engine forked would keep the writer's lock when this one is killed.
    """
    chat = getattr(state, "openai_serving_chat", None)
    if chat is None:
        raise ConfigError(f"{served.model} serves no chat completions: there is nothing to capture")
    writer = DeltaWriter(arguments.lake, arguments.worker_id, remember=_REMEMBERED)
    held.callback(writer.close)
    deltas = SharedDeltas(arguments.lake, writer)
    held.callback(deltas.close)
    stops = stop_ids_of(engine)
    template = WorkerTemplate(chat.models.model_name(), state.serving_tokenization, stops, asyncio.get_running_loop())
    facts = await asyncio.to_thread(
        read_facts,
        worker_id=writer.name,
        lake_id=read_lake(arguments.lake)["lake_id"],
        engine=engine,
        arguments=served,
        template=template,
        tokenizer=(await state.serving_tokenization.get_tokenizer_info()).model_dump(),
    )
    prompter = Prompter(template, Prefixes(deltas, arguments.prefix_cache_bytes), lambda: None)
    return CaptureWorker(
        facts=facts, chat=chat, prompter=prompter, capture=CaptureCore(writer), routing=read_routing(engine)
    )
