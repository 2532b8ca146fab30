"""The words of the pages that a newcomer may not know, each with its meaning in a sentence. A page
lists the words that it uses: see the macro `legend` in macros.html."""

from __future__ import annotations

from collections.abc import Mapping

TERMS: Mapping[str, str] = {
    "arm": "A set of sessions that are answered by the same kind of weights: the training arm by "
    "the newest weights, the baseline arm by one fixed version, the released arm by the released "
    "version. The proxy assigns each session to an arm by chance.",
    "baseline": "One fixed version of the weights, usually the model before training. It answers a "
    "share of the sessions and is never trained, so that you can compare with it.",
    "candidate": "The version of the weights that the release gate evaluates at present.",
    "difference": "The mean reward of a version minus that of the version with which it is "
    "compared, on the same rows. Above 0 is better.",
    "gain of choosing": "What it brings to serve the best of several answers: the reward of the "
    "served answer minus the mean reward of all answers to the same request.",
    "gain of the policy": "What learning has brought: the mean reward of the training arm minus "
    "that of the baseline arm.",
    "greedy": "Sampled at temperature 0, where the model always takes its most probable token.",
    "group": "One request of an app, with all answers that were sampled for it.",
    "held-out row": "A question that is only measured and never trained. A better reward on "
    "held-out rows shows that the model has learned more than the questions of its training.",
    "interval": "The two numbers in brackets. In 95 of 100 cases, the true mean lies between them. "
    "If the interval of a difference contains 0, the difference may be chance.",
    "pair": "Two results that are compared with each other, such as those of two versions on the "
    "same held-out row.",
    "policy": "The weights that are trained, as they sample answers. Each training step changes "
    "the policy.",
    "pooled": "State of a group that the server has received and that waits for a training step.",
    "release gate": "The part of the proxy that evaluates new versions on held-out rows, and "
    "releases or rejects them.",
    "released version": "The version of the weights that answers most sessions if releases are "
    "gated.",
    "served at random": "The mean reward of the answers that apps got and that were chosen by "
    "chance.",
    "served best": "The mean reward of the answers that apps got. Usually, the app gets the best "
    "answer of each group. Answers that were chosen by chance are left out.",
    "sibling": "One of the answers that were sampled for the same request. The app gets one of "
    "them. Training compares all of them.",
    "step": "One update of the weights, from the groups that were collected for it.",
    "version": "The number of a set of weights. Each training step makes a new version. Version 0 "
    "is the model before training.",
    "wins, losses, ties": "The numbers of rows on which a version has a higher, a lower, or the "
    "same mean reward as the version with which it is compared.",
}
