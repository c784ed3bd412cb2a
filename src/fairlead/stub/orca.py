"""The load report in response headers (ORCA, `endpoint-load-metrics`), as vLLM 0.32 writes it."""

import json

REQUEST_HEADER = "endpoint-load-metrics-format"


def orca_line(wanted: str, waiting: float, kv_usage: float) -> bytes:
    """The header line in the wanted format, `TEXT` or `JSON` in any case; empty for none or an unknown one."""
    metrics = {"num_requests_waiting": float(waiting), "kv_cache_usage_perc": float(kv_usage)}
    match wanted.upper():
        case "TEXT":
            value = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case "JSON":
            value = "JSON " + json.dumps({"named_metrics": metrics})
        case _:
            return b""
    return f"endpoint-load-metrics: {value}\r\n".encode()
