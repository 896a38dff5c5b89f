"""The ways on which parts move: direct lanes, streams that wait or rest, routes through other members."""
