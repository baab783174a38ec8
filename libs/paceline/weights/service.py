"""Registers WeightService: the method table of the servicer."""

from __future__ import annotations

import grpc

from paceline.v1 import weights_pb2 as pb
from paceline.v1.weights_pb2_grpc import WeightServiceServicer
from paceline.weights.wire import decode_push

SERVICE_NAME = "paceline.v1.WeightService"


def add_weight_service(servicer: WeightServiceServicer, server: grpc.aio.Server) -> None:
    """As the generated `add_WeightServiceServicer_to_server`, except that Push receives its chunks
    without protobuf's copies.
    """
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
        for name, request, response in (
            ("Prepare", pb.PrepareRequest, pb.PrepareResponse),
            ("Take", pb.TakeRequest, pb.TakeResponse),
            ("Commit", pb.CommitRequest, pb.CommitResponse),
            ("Abort", pb.AbortRequest, pb.AbortResponse),
            ("GetVersions", pb.GetVersionsRequest, pb.GetVersionsResponse),
        )
    }
    methods["Pull"] = grpc.unary_stream_rpc_method_handler(
        servicer.Pull,
        request_deserializer=pb.PullRequest.FromString,
        response_serializer=pb.PullResponse.SerializeToString,
    )
    methods["Push"] = grpc.stream_unary_rpc_method_handler(
        servicer.Push,
        request_deserializer=decode_push,
        response_serializer=pb.PushResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE_NAME, methods)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
