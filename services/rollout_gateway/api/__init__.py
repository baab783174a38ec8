"""The gateway's APIs: gRPC and HTTP."""
