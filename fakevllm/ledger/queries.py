"""What is read from the ledger, in SQL."""

CURVE = """
    WITH rewarded AS (
        SELECT g.group_id, COALESCE(g.trained_step, g.step) AS at, s.reward, s.served,
               g.served_by IS 'random' AS is_random,
               NOT (g.served_by IS 'greedy' AND s."index" = 0) AS is_sample
        FROM groups AS g JOIN siblings AS s USING (group_id)
        WHERE COALESCE(g.trained_step, g.step) IS NOT NULL AND s.reward IS NOT NULL
        AND COALESCE(g.run_id, '') = ?
    ), scored AS (
        SELECT at, SUM(is_sample) AS num, SUM(CASE WHEN is_sample THEN reward END) AS total,
               MIN(reward) = MAX(reward) AS is_flat,
               AVG(CASE WHEN served AND NOT is_random THEN reward END) AS returned,
               AVG(CASE WHEN served AND is_random THEN reward END) AS random
        FROM rewarded GROUP BY group_id
    )
    SELECT at, COUNT(*), SUM(total) / SUM(num), AVG(returned), SUM(is_flat), AVG(random)
    FROM scored GROUP BY at ORDER BY at
"""
RUNS = """
    SELECT COALESCE(run_id, '') FROM groups WHERE COALESCE(trained_step, step) IS NOT NULL
    GROUP BY 1 ORDER BY MAX(received_at) DESC
"""
UNTRAINED = """
    SELECT CASE instr(reason, ':') WHEN 0 THEN reason
           ELSE substr(reason, 1, instr(reason, ':') - 1) END AS word, COUNT(*)
    FROM groups WHERE reason IS NOT NULL GROUP BY word ORDER BY word
"""
FAILURES = """
    SELECT failure, COUNT(*) FROM siblings WHERE failure IS NOT NULL
    GROUP BY failure ORDER BY failure
"""
SCORED = """
    SELECT g.group_id, g.task_id, g.question, g.served_index, g.parent_id, s.reward + CASE
           WHEN s.served THEN COALESCE((SELECT SUM(f.amount) FROM feedback AS f
                                        WHERE f.group_id = g.group_id AND f.state = 'joined'), 0)
           ELSE 0 END
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.state = 'scored' ORDER BY g.received_at, g.group_id, s."index"
"""
ANSWERED = """
    SELECT g.request_json, s.message_json
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.response_id = ? AND g.app_key IS ? AND s.served AND s.message_json IS NOT NULL
    ORDER BY g.received_at DESC LIMIT 1
"""
LATEST = """
    SELECT group_id FROM groups AS g
    WHERE 2 <= (SELECT COUNT(*) FROM siblings AS s
                WHERE s.group_id = g.group_id AND s.message_json IS NOT NULL)
    ORDER BY received_at DESC LIMIT 1
"""
