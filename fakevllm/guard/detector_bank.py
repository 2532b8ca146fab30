"""Feed all detectors with the figures of each step. Raise at most one alarm for each episode of
trouble.

An alarm is raised when a detector's value reaches its threshold, and chance does not explain the
change. The alarm ends when the value has gone half of the way back. A value that swings around its
threshold therefore raises one alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fakevllm.guard.detectors import (
    DETECTORS,
    HELD_OUT,
    HELD_OUT_ERROR,
    REWARD,
    REWARD_THEN,
    REWARD_THEN_ERROR,
    WITHOUT_FIRST_STEPS,
)
from fakevllm.guard.trends import Trend

END_SEVERITY = 0.5
"""Severity below which an alarm ends. The severity is 1 at the threshold."""
MIN_HELD_OUT_ROWS = 20
"""Number of held-out rows of a version below which their mean is not used."""
_POINTS = (HELD_OUT, HELD_OUT_ERROR, REWARD_THEN, REWARD_THEN_ERROR)
"""Figures with one value for each evaluated version."""
_STEP_FIGURES = frozenset(
    figure for one in DETECTORS.values() for figure in one.figures
).difference(_POINTS)


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The settings of the detectors."""

    thresholds: Mapping[str, float]
    """The threshold of each detector that runs, by the detector's name."""
    baseline_steps: int = 20
    window_steps: int = 10
    reward_width: float = 1.0
    """Largest reward minus smallest reward that the hook can return."""

    def new_trend(
        self, figure: str, first: Sequence[float] = (), latest: Sequence[float] = ()
    ) -> Trend:
        """Return the trend of a figure with these values. A figure that is compared with a fixed
        threshold needs no first steps."""
        num_first = 0 if figure in WITHOUT_FIRST_STEPS else self.baseline_steps
        return Trend(num_first, self.window_steps, first, latest)


@dataclass(frozen=True, slots=True)
class HeldOutMean:
    """The mean reward of one version on held-out rows."""

    version: int
    mean: float
    error: float
    """Standard error of the mean."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """One episode of trouble, as seen by one detector."""

    detector: str
    step: int
    """Step after which the alarm was raised."""
    version: int
    """Version of the weights that the step made."""
    value: float
    """The value that reached the threshold."""
    threshold: float
    message: str
    """What the detector saw, with the threshold. It contains no text of an app."""
    remedy: str


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """A version that answered held-out rows, with the training reward at its time."""

    held_out: HeldOutMean
    reward: float
    """Mean training reward of the latest steps when the version was first evaluated. For version 0,
    the mean of the first steps."""
    reward_error: float


@dataclass(slots=True)
class DetectorBank:
    """All detectors of one run, with their memory."""

    rules: GuardRules
    trends: dict[str, Trend] = field(default_factory=dict[str, Trend])
    evaluated: list[EvaluatedVersion] = field(default_factory=list[EvaluatedVersion])
    """The first evaluated version and the latest one, or fewer."""
    active: dict[str, Alarm] = field(default_factory=dict[str, Alarm])
    """The alarms that have not ended, by the detector's name."""
    newest_version: int = 0
    """Highest version of the steps so far."""
    ignored_up_to: int = -1
    """Versions up to this one are not compared with the training reward, because it is another one
    since: training went back, or the rewards changed."""

    def step_trained(self, step: int, version: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Add the figures of a step, and return the alarms that begin with it. `figures` are the
        metrics of the run log and those of `answer_figures`. A figure may be absent."""
        self.newest_version = max(self.newest_version, version)
        for name in sorted(_STEP_FIGURES & figures.keys()):
            if name not in self.trends:
                self.trends[name] = self.rules.new_trend(name)
            self.trends[name].add(figures[name])
        return self._look(step, version, self.trends)

    def held_out_measured(self, step: int, mean: HeldOutMean) -> list[Alarm]:
        """Add the mean reward of a version on held-out rows, and return the alarms that begin with
        it. Later versions are compared with the first one that is added, or with version 0. A mean
        may be added again when it has more rows."""
        reward = self.trends.get(REWARD)
        if mean.num_rows < MIN_HELD_OUT_ROWS or reward is None or not reward.is_ready:
            return []
        known = {one.held_out.version: one for one in self.evaluated}
        if mean.version <= self.ignored_up_to and mean.version not in known:
            return []
        point = EvaluatedVersion(mean, reward.latest_mean, reward.latest_error)
        if mean.version == 0:
            point = EvaluatedVersion(mean, reward.first_mean, reward.first_error)
        if (before := known.get(mean.version)) is not None:
            point = replace(before, held_out=mean)
        known[mean.version] = point
        self.evaluated = [known[version] for version in sorted({min(known), max(known)})]
        return self._look(step, mean.version, self._evaluated_trends())

    def rewards_changed(self) -> None:
        """Begin anew, because the hooks or the job have changed: later figures cannot be compared
        with earlier ones."""
        self.trends.clear()
        self.evaluated.clear()
        self.active.clear()
        self.ignored_up_to = self.newest_version

    def training_went_back(self) -> None:
        """Forget the latest values and the alarms, because training goes on from earlier
        weights."""
        for trend in self.trends.values():
            trend.forget_latest()
        del self.evaluated[1:]
        self.active.clear()
        self.ignored_up_to = self.newest_version

    def _evaluated_trends(self) -> dict[str, Trend]:
        """Return the trends of the figures that have one value for each evaluated version."""
        width = self.rules.reward_width
        trends = {name: Trend(1, 1) for name in _POINTS}
        for one in self.evaluated:
            values = (one.held_out.mean, one.held_out.error, one.reward, one.reward_error)
            for trend, value in zip(trends.values(), values, strict=True):
                trend.add(value / width)
        return trends

    def _look(self, step: int, version: int, trends: Mapping[str, Trend]) -> list[Alarm]:
        """Let the detectors of these trends look at them. Return the alarms that begin."""
        begun: list[Alarm] = []
        for name, threshold in self.rules.thresholds.items():
            detector = DETECTORS[name]
            own = [trends.get(figure) for figure in detector.figures]
            if not all(trend is not None and trend.is_ready for trend in own):
                continue
            reading = detector.read(trends, threshold)
            if reading.severity < END_SEVERITY:
                self.active.pop(name, None)
            elif reading.severity >= 1 and reading.is_certain and name not in self.active:
                message = f"{name}: {reading.text} (threshold {threshold:g})"
                alarm = Alarm(
                    *(name, step, version, reading.value, threshold, message), detector.remedy
                )
                self.active[name] = alarm
                begun.append(alarm)
        return begun
