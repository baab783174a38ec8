"""Shared parts of three agents: a question, two tools, scoring and printing of an answer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from paceline.client import Client, Session

QUESTION = "What are our bolts worth?"
WORTH = "84.00"
INSTRUCTIONS = "You keep the warehouse's books."
_STOCK = {"bolts": 240}
_PRICES = {"bolts": 0.35}


def stock(item: str) -> int:
    """Returns the number of items in stock.

    Args:
        item: name of the item.
    """
    return _STOCK.get(item, 0)


def price(item: str) -> float:
    """Returns the price of one item.

    Args:
        item: name of the item.
    """
    return _PRICES.get(item, 0.0)


def connect() -> Client:
    """The gateway that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:7408", help="address of the gateway")
    return Client(parser.parse_args().url)


@contextmanager
def traced() -> Iterator[None]:
    """The span of an agent's run, exported to OTEL_EXPORTER_OTLP_ENDPOINT if it is set."""
    provider = TracerProvider(resource=Resource.create({"service.name": "agent"}))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    about = {"gen_ai.operation.name": "invoke_agent"}
    with provider.get_tracer("agent").start_as_current_span("invoke_agent", attributes=about):
        yield
    provider.shutdown()


def settle(session: Session, answer: str) -> None:
    """Scores the answer, ends the session and prints the tokens to train on.

    Raises AssertionError when these tokens differ from the model's output.
    """
    info = session.complete(1.0 if WORTH in answer else 0.0)
    samples = session.samples()
    trained = sum(sum(sample.loss_mask) for sample in samples)
    assert (info.state, trained) == ("final", info.completion_tokens), (info, trained)
    print(f"{info.reward:.0f}  {answer}  ({info.turns} turns in {len(samples)} branches;", end=" ")
    print(f"{trained} of {sum(len(one.token_ids) for one in samples)} tokens are trained)")
