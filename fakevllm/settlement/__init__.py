"""Settlement of groups: everything that happens to a group after its app has been answered.

`reward_delivery` writes a group to the ledger and then sends its rewards to the swarm server.
`pending_groups` holds groups that wait for feedback. `feedback_service` accepts feedback, asks the
`on_feedback` hook for its value, and adds the value to the group's reward. Feedback that arrives
after its group was sent to the server becomes a training sample of its own in `late_feedback`.

A group or sample that the server may train on is always in the ledger first. If a stop or a crash
prevents rewards or feedback from being sent, the next proxy process sends them, and the server
accepts each group and each sample once. Nothing in this folder delays an app's answer.
"""
