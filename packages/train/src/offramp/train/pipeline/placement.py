"""Which rank is which part of which stage of which replica, and what therefore goes from node to node.

Ranks count parts of a stage first, then replicas, then stages, as DeepSpeed's and Megatron's do. So what is exchanged
most stays closest: the ranks of a tensor group, which add up states twice in every layer, are neighbours; the replicas
of a stage, which add up its gradients while nothing else goes on, come next; between stages only states and gradients
of micro-batches go, while others are computed.

Legend: S stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offramp.train.pipeline.stages import replicas


@dataclass(frozen=True)
class Placement:
    """Ranks of a pipeline on nodes.

    Attributes:
        pipe: stages, S.
        replicas: of each.
        tensor: parts of each replica of a stage.
        per_node: ranks on a node, which follow each other.
    """

    pipe: int
    replicas: int
    tensor: int
    per_node: int

    @classmethod
    def of(cls, pipe: int, tensor: int, nodes: int, per_node: int) -> Placement:
        """Of as many replicas as there are ranks for.

        Raises:
            OfframpError: ranks would be left over.
        """
        return cls(pipe, replicas(nodes * per_node, pipe, tensor), tensor, per_node)

    def rank(self, stage: int, replica: int, part: int) -> int:
        """Of a part of a replica of a stage."""
        return (stage * self.replicas + replica) * self.tensor + part

    def replica_of(self, rank: int) -> int:
        """Whose rows a rank reads."""
        return rank // self.tensor % self.replicas

    def nodes_of(self, stage: int) -> range:
        """Nodes that a stage lies on, of all its replicas."""
        last = self.rank(stage, self.replicas - 1, self.tensor - 1)
        return range(self.rank(stage, 0, 0) // self.per_node, last // self.per_node + 1)

    @property
    def splits_tensor_groups(self) -> bool:
        """Whether ranks of one tensor group lie on different nodes."""
        return any(
            self.rank(stage, replica, 0) // self.per_node != self.rank(stage, replica, self.tensor - 1) // self.per_node
            for stage in range(self.pipe)
            for replica in range(self.replicas)
        )

    def describe(self) -> str:
        """What lies where, and what goes from node to node, for people."""
        stages = ", ".join(f"stage {stage} on {_named(self.nodes_of(stage))}" for stage in range(self.pipe))
        crossing = []
        if self.splits_tensor_groups:
            crossing.append("sums within layers")
        if any(len(self.nodes_of(stage)) > 1 for stage in range(self.pipe)) and self.replicas > 1:
            crossing.append("sums of gradients over replicas")
        cut = [stage for stage in range(self.pipe - 1) if self._crosses(stage)]
        if cut:
            pairs = ", ".join(f"{stage} and {stage + 1}" for stage in cut)
            crossing.append(f"states and gradients between stages {pairs}")
        return f"{stages}; from node to node go {' and '.join(crossing) or 'only sums of norms and losses'}"

    def describe_shared(self, shared: Mapping[str, Iterable[int]]) -> str | None:
        """What goes from node to node for parameters that several stages hold, for people; None if nothing does.

        Args:
            shared: trained parameters, by name, with the stages that hold them.
        """
        crossing = [name for name, holders in shared.items() if self._lie_apart(tuple(holders))]
        if not crossing:
            return None
        return (
            f"stages on different nodes share {', '.join(crossing)}: sums of gradients go from node to node at every "
            "step for this too"
        )

    def _lie_apart(self, stages: tuple[int, ...]) -> bool:
        """Whether ranks of these stages that hold the same part of the same replica lie on different nodes."""
        return any(
            len({self.rank(stage, replica, part) // self.per_node for stage in stages}) > 1
            for replica in range(self.replicas)
            for part in range(self.tensor)
        )

    def _crosses(self, stage: int) -> bool:
        """Whether some rank of a stage has its counterpart of the next one on another node."""
        ranks = range(self.rank(stage, 0, 0), self.rank(stage + 1, 0, 0))
        return any(rank // self.per_node != (rank + len(ranks)) // self.per_node for rank in ranks)


def _named(nodes: range) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
