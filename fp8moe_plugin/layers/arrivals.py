"""The tensors that have arrived for a serving model. An FP8 weight and its scales are only correct together."""

from dataclasses import dataclass, field

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.spec import SCALE_NAMES
from fp8moe_plugin.formats.weight_format import Role


@dataclass
class Arrivals:
    """The tensors that were loaded in place into the quantized layers of a model since its last step.

    Engines may spread a weight and its scales over several calls, so the two are compared only after all calls: before
    the next step, or at the end of an update.
    """

    _roles: dict[str, list[Role]] = field(default_factory=dict)  # by projection, in the order of their arrival

    def note(self, projection: str, *roles: Role) -> None:
        """Note that tensors are written. Several threads may call it.

        Args:
            projection: one of a layer or of an expert, such as "model.layers.0.mlp.experts (w1 of expert 3)".
            roles: the tensors' roles; both roles if one tensor gives the weight and its scales.
        """
        self._roles.setdefault(projection, []).extend(roles)

    def clear(self) -> None:
        """Forget the arrivals, because they were checked in another way."""
        self._roles.clear()

    def check(self) -> None:
        """Check that each weight has arrived with its scales, then forget the arrivals.

        Raises:
            CheckpointError: a weight has arrived without its scales, or scales without their weight.
        """
        last = {name: _alone(roles) for name, roles in self._roles.items()}
        alone = {name: role for name, role in last.items() if role}
        self.clear()
        for name, role in alone.items():
            raise CheckpointError(
                f"{name}: new {role} arrived without the {role.other}{and_others(len(alone) - 1)}. An FP8 weight and "
                "its scales must be loaded together, before the next step."
            )


def _alone(roles: list[Role]) -> Role | None:
    """Returns the role that arrived without the other one. After a pair, the next tensor begins another, newer one."""
    alone = None
    for role in roles:
        alone = None if alone is role.other else role
    return alone


def and_others(count: int) -> str:
    """Returns the part of a message that counts further projections with the same fault."""
    return f" (and so for {count} more projection{'s' * (count > 1)})" if count else ""


def check_scale_name(name: str, scales: tuple[str, ...]) -> None:
    """Raise `CheckpointError` for scales under a name that the model does not have.

    Args:
        name: of a tensor of the checkpoint.
        scales: the suffixes of scales' names; empty for an unquantized checkpoint, which has no scales.
    """
    last = name.rpartition(".")[2]
    if last not in SCALE_NAMES or last in scales:
        return
    wanted = f"names scales {' or '.join(scales)}" if scales else "is unquantized and has no scales"
    raise CheckpointError(
        f"{name} is unexpected: a checkpoint of this model's format {wanted}. Load weights of the format that the "
        "model's config.json describes."
    )
