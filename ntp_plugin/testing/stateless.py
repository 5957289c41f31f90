"""A trainer without state, to test recovery alone."""

from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report


class Stateless:
    """Resumes from any step."""

    def report(self) -> Report:
        return Report(applied=0, oldest=0)

    def plan(self, agreed: Agreed) -> str:
        return str(agreed.view.epoch)

    def resume_from(self, agreed: Agreed) -> None:
        assert agreed.view.slots
