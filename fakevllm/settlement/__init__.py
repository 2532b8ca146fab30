"""Settlement of groups (requests with all their sampled answers): everything that happens to a
group after the app has been answered.

`reward_delivery` writes a group to the ledger, the proxy's database, and then sends the group's
rewards to the swarm server. `pending_groups` holds groups that wait for feedback.
`feedback_service` accepts feedback, gets its value from the `on_feedback` hook, and adds the value
to the group's reward.

Feedback may arrive after its group was sent to the server. `late_feedback` then makes a training
sample from the feedback. `edit_samples` sends users' edits of answers as demonstrations, and
`edit_demonstrations` decides which token ids an edit has. `sending_loop` is the loop of both
background tasks. `held_out_groups` finds recorded groups that quote a held-out row (a row that is
reserved for evaluation). Such groups must not be trained.

A group or sample is in the ledger before the server can train on it. If a stop or a crash prevents
rewards or feedback from being sent, the next proxy process sends them. The server accepts each
group and each sample only once. Nothing in this folder delays an app's answer.
"""
