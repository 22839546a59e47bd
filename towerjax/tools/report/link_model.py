"""How long does a step take on paper? A roofline, and rings in and between nodes.

``n`` devices lie in nodes of ``g``: ``i = min(n, g)`` of them in one, in ``o = ceil(n /
g)`` nodes. A ring of ``m`` devices passes a ``m``-th part of ``b`` bytes on ``m - 1``
times a round: ``ring(b, m, link) = (m - 1) (latency + b / (m bandwidth))``. An
all-reduce is two rounds in the node, and two of a ``1/i`` part between nodes.
"""

from towerjax.tools.report.hardware import Hardware, Link


def seconds_to_send(opcode: str, operand_bytes: int, n: int, on: Hardware) -> float:
    """How long a collective takes, with nothing else beside it."""
    if n <= 1:
        return 0.0
    inside = min(n, on.devices_per_node)
    nodes = -(-n // on.devices_per_node)
    # An all-gather's operand is a part of what goes round, the others' are all of it.
    size = operand_bytes * n if opcode == "all-gather" else operand_bytes
    rounds = 2 if opcode == "all-reduce" else 1
    if opcode in ("collective-permute", "collective-broadcast"):
        link = _link(on, nodes > 1)
        return link.latency_s + size / (link.bandwidth * on.link_efficiency)
    if opcode == "all-to-all":
        part = operand_bytes / n  # for each of the others
        near = _pass(part * (inside - 1), inside, on, False)
        return near + _pass(part * (n - inside), nodes, on, True)
    return rounds * (
        _ring(size, inside, on, False) + _ring(size / inside, nodes, on, True)
    )


def _ring(size: float, members: int, on: Hardware, between_nodes: bool) -> float:
    if members <= 1:
        return 0.0
    link = _link(on, between_nodes)
    part = size / members / (link.bandwidth * on.link_efficiency)
    return (members - 1) * (link.latency_s + part)


def _pass(size: float, members: int, on: Hardware, between_nodes: bool) -> float:
    """Bytes of which each member gets its own, one after the other."""
    if members <= 1:
        return 0.0
    link = _link(on, between_nodes)
    sent = size / (link.bandwidth * on.link_efficiency)
    return (members - 1) * link.latency_s + sent


def _link(on: Hardware, between_nodes: bool) -> Link:
    link = on.network if between_nodes else on.node
    if link is None:
        which = "network between nodes" if between_nodes else "link between devices"
        raise ValueError(
            f"{on.name} has no {which}. Plan for {on.devices_per_node} towers at most,"
            " or say what there is: dataclasses.replace(hardware, node=...,"
            " network=Link(bandwidth, latency_s))."
        )
    return link


def seconds_to_compute(
    by_dtype: tuple[tuple[str, int], ...], product_bytes: int, on: Hardware
) -> float:
    """The products' time: of arithmetic or of memory, whichever is longer."""
    arithmetic = sum(
        flops / (on.peak_of(dtype) * on.matmul_efficiency) for dtype, flops in by_dtype
    )
    return max(arithmetic, seconds_to_move(product_bytes, on))


def seconds_to_move(size: int, on: Hardware) -> float:
    """How long reading or writing takes."""
    return size / (on.memory_bandwidth * on.memory_efficiency)
