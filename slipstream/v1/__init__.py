"""Generated protobuf and gRPC stubs of the `slipstream.v1` package; `make stubs` writes them."""
