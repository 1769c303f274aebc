"""Everything that faces a person or a network: gRPC, text, metrics, logs, config, commands."""
