"""The migrations that create the tables of the ledger and change them.

A released migration is never edited, because existing ledgers have already applied it. Add each
change of the tables as a new migration at the end.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm.ledger import stored_contents, stored_messages
from fakevllm_runtime.migrations import Migration


def m001_tables(db: Connection) -> None:
    for statement in _M001:
        db.exec_driver_sql(statement)


def m002_response_id(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN response_id VARCHAR")
    db.exec_driver_sql("CREATE INDEX ix_groups_response_id ON groups (response_id)")


def m003_how_served(db: Connection) -> None:
    for column in ("served_by VARCHAR", "propensity FLOAT", "cut VARCHAR"):
        db.exec_driver_sql(f"ALTER TABLE groups ADD COLUMN {column}")


def m004_place(db: Connection) -> None:
    names = ("session_id", "parent_session_id", "parent_id", "kind", "evidence", "asked_key")
    for column in (*(f"{name} VARCHAR" for name in names), "turn INTEGER"):
        db.exec_driver_sql(f"ALTER TABLE groups ADD COLUMN {column}")
    db.exec_driver_sql("CREATE INDEX ix_groups_session_id ON groups (session_id)")
    # This index contains all columns that a proxy reads at its start. In the table, these columns
    # are stored after the whole request, so that reading them is slow.
    db.exec_driver_sql(
        "CREATE INDEX ix_groups_place ON groups (received_at, group_id, app_key, session_id, "
        "parent_session_id, parent_id, turn, kind, evidence, asked_key, response_id)"
    )


def m005_resent(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN num_resent INTEGER NOT NULL DEFAULT 0")
    db.exec_driver_sql("""
        CREATE TABLE kept_answers (
            group_id VARCHAR NOT NULL,
            "key" BLOB NOT NULL,
            until FLOAT NOT NULL,
            status INTEGER NOT NULL,
            headers_json VARCHAR NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (group_id)
        )
    """)


def m006_feedback(db: Connection) -> None:
    for column in ("answer_id VARCHAR", "run_id VARCHAR"):
        db.exec_driver_sql(f"ALTER TABLE groups ADD COLUMN {column}")
    db.exec_driver_sql("CREATE INDEX ix_groups_answer_id ON groups (answer_id)")
    db.exec_driver_sql("ALTER TABLE calls ADD COLUMN shaped BOOLEAN")
    db.exec_driver_sql("""
        CREATE TABLE feedback (
            group_id VARCHAR NOT NULL,
            feedback_id VARCHAR NOT NULL,
            received_at FLOAT NOT NULL,
            app_key VARCHAR,
            kind VARCHAR NOT NULL,
            score FLOAT,
            thumbs VARCHAR,
            edited VARCHAR,
            comment VARCHAR,
            state VARCHAR NOT NULL,
            reason VARCHAR,
            value FLOAT,
            baseline FLOAT,
            amount FLOAT,
            hook_hash VARCHAR,
            trained_step INTEGER,
            trained_version INTEGER,
            PRIMARY KEY (group_id, feedback_id)
        )
    """)
    db.exec_driver_sql("CREATE INDEX ix_feedback_state ON feedback (state)")
    db.exec_driver_sql("CREATE INDEX ix_feedback_app ON feedback (app_key, received_at)")


def m007_failure(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE siblings ADD COLUMN failure VARCHAR")


def m008_advantage(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE siblings ADD COLUMN advantage FLOAT")


def m009_task_owner(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE tasks ADD COLUMN owner VARCHAR")


def m010_responses(db: Connection) -> None:
    db.exec_driver_sql("""
        CREATE TABLE responses (
            response_id VARCHAR NOT NULL,
            owner VARCHAR NOT NULL,
            group_id VARCHAR,
            created_at FLOAT NOT NULL,
            body BLOB,
            deleted_at FLOAT,
            PRIMARY KEY (response_id, owner)
        )
    """)


def m011_job_hash(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN job_hash VARCHAR")


def m012_counters(db: Connection) -> None:
    """Add tables of counters, fill them from the rows, and count feedback with triggers."""
    for statement in _M012_TABLES:
        db.exec_driver_sql(statement)
    fill_counters(db)
    for statement in _M012_TRIGGERS:
        db.exec_driver_sql(statement)


def fill_counters(db: Connection) -> None:
    """Fill the empty counter tables of `m012_counters` from the rows of all groups."""
    for statement in _M012_FILL:
        db.exec_driver_sql(statement)


def m013_pieces(db: Connection) -> None:
    """Store requests and prompts as lists of byte ranges in shared pieces (see contents.py of
    fakevllm_runtime). Store messages without their text and tool calls, which have columns of their
    own.

    Views with the names `groups`, `siblings` and `calls` replace the tables with these names. Each
    view has the columns of the table that it replaces.
    """
    for statement in _M013_TABLES:
        db.exec_driver_sql(statement)
    stored_contents.move_contents(db)
    stored_messages.move_messages(db)
    for statement in _M013_VIEWS:
        db.exec_driver_sql(statement)


def m014_evaluations(db: Connection) -> None:
    """Add the columns for evaluations to the table `group_rows` and to its view `groups`."""
    for statement in _M014:
        db.exec_driver_sql(statement)


def m015_arms(db: Connection) -> None:
    """Add the columns for arms to the table `group_rows` and to its view `groups`.

    An arm is a set of sessions that one version of the weights answers.
    """
    for statement in _M015:
        db.exec_driver_sql(statement)


def m016_rescored(db: Connection) -> None:
    db.exec_driver_sql(_M016)


def m017_forgotten(db: Connection) -> None:
    for statement in _M017_FORGOTTEN:
        db.exec_driver_sql(statement)


def m018_edits(db: Connection) -> None:
    """Add the columns for the training of users' edits: state, reason, step and version. Earlier
    edits have no state, because they were not trained."""
    for statement in _M018_EDITS:
        db.exec_driver_sql(statement)


def m019_costs(db: Connection) -> None:
    """Add the numbers of tokens of each training step, and the versions of the weights with the
    seconds that they took. The seconds of earlier steps stay unknown."""
    for statement in _M019_TABLES:
        db.exec_driver_sql(statement)
    fill_token_counters(db)
    db.exec_driver_sql(_M019_VERSIONS)


def fill_token_counters(db: Connection) -> None:
    """Fill the table `step_tokens` and the counters of served, trained and evaluated tokens from
    the rows of all groups."""
    for statement in _M019_FILL:
        db.exec_driver_sql(statement)


def m020_replica(db: Connection) -> None:
    """Add the name of the rollout replica to the table `call_rows` and to its view `calls`. The
    replicas of earlier calls stay unknown."""
    for statement in _M020:
        db.exec_driver_sql(statement)


MIGRATIONS: list[Migration] = [
    m001_tables,
    m002_response_id,
    m003_how_served,
    m004_place,
    m005_resent,
    m006_feedback,
    m007_failure,
    m008_advantage,
    m009_task_owner,
    m010_responses,
    m011_job_hash,
    m012_counters,
    m013_pieces,
    m014_evaluations,
    m015_arms,
    m016_rescored,
    m017_forgotten,
    m018_edits,
    m019_costs,
    m020_replica,
]


_M001 = (
    """
    CREATE TABLE groups (
        group_id VARCHAR NOT NULL,
        received_at FLOAT NOT NULL,
        route VARCHAR NOT NULL,
        model VARCHAR NOT NULL,
        streamed BOOLEAN NOT NULL,
        task_id VARCHAR,
        app_key VARCHAR,
        request_json VARCHAR NOT NULL,
        question VARCHAR NOT NULL,
        num_siblings INTEGER NOT NULL,
        status INTEGER NOT NULL,
        latency_s FLOAT NOT NULL,
        served_index INTEGER,
        best_index INTEGER,
        state VARCHAR NOT NULL,
        reason VARCHAR,
        hook_hash VARCHAR,
        step INTEGER,
        trained_step INTEGER,
        trained_version INTEGER,
        PRIMARY KEY (group_id)
    )
    """,
    "CREATE INDEX ix_groups_state ON groups (state)",
    "CREATE INDEX ix_groups_step ON groups (step)",
    """
    CREATE TABLE siblings (
        group_id VARCHAR NOT NULL,
        "index" INTEGER NOT NULL,
        served BOOLEAN NOT NULL,
        best BOOLEAN NOT NULL,
        status INTEGER NOT NULL,
        message_json VARCHAR,
        text VARCHAR,
        tool_calls_json VARCHAR,
        finish_reason VARCHAR,
        prompt_tokens INTEGER,
        completion_tokens INTEGER,
        reward FLOAT,
        annotations_json VARCHAR,
        error VARCHAR,
        trained BOOLEAN NOT NULL,
        PRIMARY KEY (group_id, "index"),
        FOREIGN KEY (group_id) REFERENCES groups (group_id) ON DELETE CASCADE
    )
    """,
    """
    CREATE TABLE calls (
        group_id VARCHAR NOT NULL,
        sibling INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        prompt_ids BLOB NOT NULL,
        response_ids BLOB NOT NULL,
        logprobs BLOB,
        weight_versions_json VARCHAR NOT NULL,
        weight_version INTEGER,
        temperature FLOAT NOT NULL,
        finish_reason VARCHAR,
        untrainable VARCHAR,
        PRIMARY KEY (group_id, sibling, seq),
        FOREIGN KEY (group_id) REFERENCES groups (group_id) ON DELETE CASCADE
    )
    """,
    """
    CREATE TABLE tasks (
        task_id VARCHAR NOT NULL,
        main_query VARCHAR NOT NULL,
        metadata_json VARCHAR NOT NULL,
        created_at FLOAT NOT NULL,
        PRIMARY KEY (task_id)
    )
    """,
    "CREATE TABLE meta (key VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY (key))",
)

_M012_TABLES = (
    """
    CREATE TABLE counters (
        subject VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        num INTEGER NOT NULL,
        PRIMARY KEY (subject, name)
    )
    """,
    """
    CREATE TABLE step_counters (
        run_id VARCHAR NOT NULL,
        step INTEGER NOT NULL,
        num_groups INTEGER NOT NULL,
        num_samples INTEGER NOT NULL,
        reward_sum FLOAT NOT NULL,
        num_best INTEGER NOT NULL,
        best_sum FLOAT NOT NULL,
        num_flat INTEGER NOT NULL,
        num_random INTEGER NOT NULL,
        random_sum FLOAT NOT NULL,
        PRIMARY KEY (run_id, step)
    )
    """,
    """
    CREATE TABLE step_digests (
        run_id VARCHAR NOT NULL,
        step INTEGER NOT NULL,
        kind VARCHAR NOT NULL,
        digest VARCHAR NOT NULL,
        num INTEGER NOT NULL,
        PRIMARY KEY (run_id, step, kind, digest)
    )
    """,
    """
    CREATE TABLE run_digests (
        run_id VARCHAR NOT NULL,
        kind VARCHAR NOT NULL,
        digest VARCHAR NOT NULL,
        num INTEGER NOT NULL,
        PRIMARY KEY (run_id, kind, digest)
    )
    """,
    """
    CREATE TABLE run_counters (
        run_id VARCHAR NOT NULL,
        newest_at FLOAT NOT NULL,
        num_groups INTEGER NOT NULL,
        num_steps INTEGER NOT NULL,
        PRIMARY KEY (run_id)
    )
    """,
    """
    CREATE TABLE session_counters (
        session_id VARCHAR NOT NULL,
        parent_session_id VARCHAR,
        app_key VARCHAR,
        turns INTEGER,
        num_groups INTEGER NOT NULL,
        seen_at FLOAT NOT NULL,
        num_rewards INTEGER NOT NULL,
        reward_sum FLOAT NOT NULL,
        first_group_id VARCHAR NOT NULL,
        first_is_side BOOLEAN NOT NULL,
        first_at FLOAT NOT NULL,
        PRIMARY KEY (session_id)
    )
    """,
    "CREATE INDEX ix_session_counters_seen ON session_counters (seen_at)",
)
_M012_FILL = (
    "INSERT INTO counters SELECT 'state', state, COUNT(*) FROM groups GROUP BY state",
    """
    INSERT INTO counters SELECT 'untrained', substr(reason, 1, instr(reason || ':', ':') - 1),
    COUNT(*) FROM groups WHERE reason IS NOT NULL GROUP BY 2
    """,
    """
    INSERT INTO counters SELECT 'failure', failure, COUNT(*) FROM siblings
    WHERE failure IS NOT NULL GROUP BY failure
    """,
    """
    INSERT INTO counters SELECT 'tokens', 'sampled', num
    FROM (SELECT SUM(completion_tokens) AS num FROM siblings) WHERE num > 0
    """,
    "INSERT INTO counters SELECT 'feedback', state, COUNT(*) FROM feedback GROUP BY state",
    """
    INSERT INTO step_counters
    SELECT run_id, step, COUNT(*), SUM(num), SUM(total), COUNT(best), COALESCE(SUM(best), 0.0),
           SUM(is_flat), COUNT(random), COALESCE(SUM(random), 0.0)
    FROM (
        SELECT COALESCE(g.run_id, '') AS run_id, COALESCE(g.trained_step, g.step) AS step,
               SUM(NOT (g.served_by IS 'greedy' AND s."index" = 0)) AS num,
               SUM(CASE WHEN g.served_by IS 'greedy' AND s."index" = 0 THEN 0.0
                   ELSE s.reward END) AS total,
               AVG(CASE WHEN s.served AND g.served_by IS NOT 'random' THEN s.reward END) AS best,
               AVG(CASE WHEN s.served AND g.served_by IS 'random' THEN s.reward END) AS random,
               MIN(s.reward) = MAX(s.reward) AS is_flat
        FROM groups AS g JOIN siblings AS s USING (group_id)
        WHERE s.reward IS NOT NULL AND COALESCE(g.trained_step, g.step) IS NOT NULL
        GROUP BY g.group_id
    ) GROUP BY run_id, step
    """,
    *(
        f"""
        INSERT INTO step_digests
        SELECT COALESCE(run_id, ''), COALESCE(trained_step, step), '{kind}', {kind}_hash, COUNT(*)
        FROM groups AS g WHERE {kind}_hash <> '' AND COALESCE(trained_step, step) IS NOT NULL
        AND EXISTS (SELECT 1 FROM siblings AS s
                    WHERE s.group_id = g.group_id AND s.reward IS NOT NULL)
        GROUP BY 1, 2, 4
        """
        for kind in ("hook", "job")
    ),
    """
    INSERT INTO run_digests SELECT run_id, kind, digest, SUM(num) FROM step_digests
    GROUP BY run_id, kind, digest
    """,
    """
    INSERT INTO run_counters
    SELECT COALESCE(g.run_id, ''), MAX(g.received_at), COUNT(*),
           (SELECT COUNT(*) FROM step_counters AS s WHERE s.run_id = COALESCE(g.run_id, ''))
    FROM groups AS g WHERE COALESCE(g.trained_step, g.step) IS NOT NULL GROUP BY 1
    """,
    """
    INSERT INTO session_counters
    SELECT session_id, MAX(parent_session_id), MAX(app_key), MAX(turn), COUNT(*), MAX(received_at),
           COALESCE(SUM(num_rewards), 0), COALESCE(SUM(reward_sum), 0.0), '', 1, 0.0
    FROM groups AS g LEFT JOIN (
        SELECT group_id, COUNT(reward) AS num_rewards, SUM(reward) AS reward_sum FROM siblings
        WHERE served GROUP BY group_id
    ) USING (group_id) WHERE session_id IS NOT NULL GROUP BY session_id
    """,
    """
    UPDATE session_counters SET first_group_id = (
        SELECT g.group_id FROM groups AS g WHERE g.session_id = session_counters.session_id
        ORDER BY g.kind IS 'side', g.received_at, g.group_id LIMIT 1)
    """,
    """
    UPDATE session_counters SET
    first_is_side = (SELECT g.kind IS 'side' FROM groups AS g WHERE g.group_id = first_group_id),
    first_at = (SELECT g.received_at FROM groups AS g WHERE g.group_id = first_group_id)
    """,
)
_M012_COUNT = """
    INSERT INTO counters VALUES ('feedback', {0}, {1})
    ON CONFLICT (subject, name) DO UPDATE SET num = num + {1};
"""
_M012_TRIGGERS = (
    f"""
    CREATE TRIGGER count_feedback AFTER INSERT ON feedback
    BEGIN {_M012_COUNT.format("NEW.state", 1)} END
    """,
    f"""
    CREATE TRIGGER count_changed_feedback AFTER UPDATE OF state ON feedback
    WHEN OLD.state <> NEW.state
    BEGIN {_M012_COUNT.format("OLD.state", -1)} {_M012_COUNT.format("NEW.state", 1)} END
    """,
    f"""
    CREATE TRIGGER count_deleted_feedback AFTER DELETE ON feedback
    BEGIN {_M012_COUNT.format("OLD.state", -1)} END
    """,
)

_M013_TABLES = (
    "CREATE TABLE pieces (piece_id INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (piece_id))",
    "ALTER TABLE groups RENAME TO group_rows",
    "ALTER TABLE group_rows ADD COLUMN request_slices VARCHAR",
    "ALTER TABLE group_rows ADD COLUMN request_digest BLOB",
    "ALTER TABLE calls RENAME TO call_rows",
    "ALTER TABLE call_rows ADD COLUMN prompt INTEGER",
    "ALTER TABLE call_rows ADD COLUMN response_piece INTEGER",
    """
    CREATE TABLE prompts (
        prompt_id INTEGER NOT NULL,
        slices VARCHAR NOT NULL,
        digest BLOB NOT NULL,
        PRIMARY KEY (prompt_id)
    )
    """,
    "ALTER TABLE siblings RENAME TO sibling_rows",
    "ALTER TABLE sibling_rows ADD COLUMN text_at INTEGER",
    "ALTER TABLE sibling_rows ADD COLUMN tool_calls_at INTEGER",
)
_M013_JOIN = """
    CASE WHEN {reference} IS NULL THEN {column} ELSE (
        SELECT CAST(group_concat(part, '') AS {type}) FROM (
            SELECT substr(p.data, json_extract(s.value, '$[1]') + 1,
                          json_extract(s.value, '$[2]')) AS part
            FROM json_each({slices}) AS s
            JOIN pieces AS p ON p.piece_id = json_extract(s.value, '$[0]') ORDER BY s.key
        )
    ) END AS {column}
"""
_M013_REQUEST = _M013_JOIN.format(
    column="request_json", reference="request_slices", slices="request_slices", type="TEXT"
)
_M013_PROMPT = _M013_JOIN.format(
    column="prompt_ids",
    reference="prompt",
    slices="(SELECT q.slices FROM prompts AS q WHERE q.prompt_id = prompt)",
    type="BLOB",
)
_M013_RESPONSE = """
    CASE WHEN response_piece IS NULL THEN response_ids ELSE (
        SELECT p.data FROM pieces AS p WHERE p.piece_id = response_piece
    ) END AS response_ids
"""
_M013_INSERT = """
    CASE WHEN {at} IS NULL THEN {message}
    ELSE substr({message}, 1, {at}) || {part} || substr({message}, {at} + 1) END
"""
_M013_WITH_CALLS = _M013_INSERT.format(
    message="message_json", at="tool_calls_at", part="tool_calls_json"
)
_M013_MESSAGE = _M013_INSERT.format(
    message=f"({_M013_WITH_CALLS})", at="text_at", part="json_quote(text)"
)
_M013_VIEWS = (
    f"""
    CREATE VIEW groups AS SELECT
        group_id, received_at, route, model, streamed, task_id, app_key, {_M013_REQUEST}, question,
        num_siblings, status, latency_s, served_index, best_index, state, reason, hook_hash, step,
        trained_step, trained_version, response_id, served_by, propensity, cut, session_id,
        parent_session_id, parent_id, kind, evidence, asked_key, turn, num_resent, answer_id,
        run_id, job_hash
    FROM group_rows
    """,
    f"""
    CREATE VIEW siblings AS SELECT
        group_id, "index", served, best, status, {_M013_MESSAGE} AS message_json, text,
        tool_calls_json, finish_reason, prompt_tokens, completion_tokens, reward,
        annotations_json, error, trained, failure, advantage
    FROM sibling_rows
    """,
    f"""
    CREATE VIEW calls AS SELECT
        group_id, sibling, seq, {_M013_PROMPT}, {_M013_RESPONSE}, logprobs, weight_versions_json,
        weight_version, temperature, finish_reason, untrainable, shaped
    FROM call_rows
    """,
)

_M014 = (
    "ALTER TABLE group_rows ADD COLUMN eval_id VARCHAR",
    "ALTER TABLE group_rows ADD COLUMN eval_version INTEGER",
    "DROP VIEW groups",
    f"""
    CREATE VIEW groups AS SELECT
        group_id, received_at, route, model, streamed, task_id, app_key, {_M013_REQUEST}, question,
        num_siblings, status, latency_s, served_index, best_index, state, reason, hook_hash, step,
        trained_step, trained_version, response_id, served_by, propensity, cut, session_id,
        parent_session_id, parent_id, kind, evidence, asked_key, turn, num_resent, answer_id,
        run_id, job_hash, eval_id, eval_version
    FROM group_rows
    """,
)

_M015 = (
    "ALTER TABLE group_rows ADD COLUMN arm VARCHAR",
    "ALTER TABLE group_rows ADD COLUMN arm_propensity FLOAT",
    "CREATE INDEX ix_groups_arm ON group_rows (received_at) WHERE arm_propensity IS NOT NULL",
    "DROP VIEW groups",
    f"""
    CREATE VIEW groups AS SELECT
        group_id, received_at, route, model, streamed, task_id, app_key, {_M013_REQUEST}, question,
        num_siblings, status, latency_s, served_index, best_index, state, reason, hook_hash, step,
        trained_step, trained_version, response_id, served_by, propensity, cut, session_id,
        parent_session_id, parent_id, kind, evidence, asked_key, turn, num_resent, answer_id,
        run_id, job_hash, eval_id, eval_version, arm, arm_propensity
    FROM group_rows
    """,
)

_M016 = """
    CREATE TABLE rescored (
        group_id VARCHAR NOT NULL,
        hook_hash VARCHAR NOT NULL,
        "index" INTEGER NOT NULL,
        reward FLOAT,
        annotations_json VARCHAR,
        reason VARCHAR,
        scored_at FLOAT NOT NULL,
        PRIMARY KEY (group_id, hook_hash, "index"),
        FOREIGN KEY (group_id) REFERENCES group_rows (group_id) ON DELETE CASCADE
    )
"""

_M017_FORGOTTEN = (
    """
    CREATE TABLE forgotten_groups (
        group_id VARCHAR NOT NULL,
        cause VARCHAR NOT NULL,
        forgotten_at FLOAT NOT NULL,
        is_sent BOOLEAN NOT NULL,
        PRIMARY KEY (group_id)
    )
    """,
    "CREATE INDEX ix_forgotten_unsent ON forgotten_groups (group_id) WHERE NOT is_sent",
    "CREATE TABLE loose_pieces (piece_id INTEGER NOT NULL, PRIMARY KEY (piece_id))",
    """
    CREATE INDEX ix_calls_response_piece ON call_rows (response_piece)
    WHERE response_piece IS NOT NULL
    """,
)

_M018_EDITS = (
    *(
        f"ALTER TABLE feedback ADD COLUMN {column}"
        for column in (
            *("edit_state VARCHAR", "edit_reason VARCHAR"),
            *("edit_step INTEGER", "edit_version INTEGER"),
        )
    ),
    "CREATE INDEX ix_feedback_edit ON feedback (edit_state) WHERE edit_state IS NOT NULL",
)

_M019_TABLES = (
    """
    CREATE TABLE step_tokens (
        run_id VARCHAR NOT NULL,
        step INTEGER NOT NULL,
        num_sampled INTEGER NOT NULL,
        num_served INTEGER NOT NULL,
        num_trained INTEGER NOT NULL,
        PRIMARY KEY (run_id, step)
    )
    """,
    """
    CREATE TABLE trained_versions (
        run_id VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        step INTEGER NOT NULL,
        step_s FLOAT,
        update_s FLOAT,
        PRIMARY KEY (run_id, version)
    )
    """,
)
_M019_FILL = (
    """
    INSERT INTO step_tokens
    SELECT COALESCE(g.run_id, ''), COALESCE(g.trained_step, g.step),
           SUM(s.completion_tokens) AS num,
           COALESCE(SUM(CASE WHEN s.served THEN s.completion_tokens END), 0),
           COALESCE(SUM(CASE WHEN s.trained THEN s.completion_tokens END), 0)
    FROM group_rows AS g JOIN sibling_rows AS s USING (group_id)
    WHERE COALESCE(g.trained_step, g.step) IS NOT NULL GROUP BY 1, 2 HAVING num > 0
    """,
    *(
        f"""
        INSERT INTO counters SELECT 'tokens', '{name}', num FROM (
            SELECT SUM(s.completion_tokens) AS num
            FROM group_rows AS g JOIN sibling_rows AS s USING (group_id) WHERE {condition}
        ) WHERE num > 0
        """
        for name, condition in (
            ("served", "s.served AND g.kind IS NOT 'eval'"),
            ("trained", "s.trained AND g.kind IS NOT 'eval'"),
            ("evaluated", "g.kind = 'eval'"),
        )
    ),
)
_M019_VERSIONS = """
    INSERT INTO trained_versions
    SELECT COALESCE(run_id, ''), trained_version, MAX(trained_step), NULL, NULL FROM group_rows
    WHERE trained_version IS NOT NULL AND trained_step IS NOT NULL GROUP BY 1, 2
"""

_M020 = (
    "ALTER TABLE call_rows ADD COLUMN replica VARCHAR",
    "DROP VIEW calls",
    f"""
    CREATE VIEW calls AS SELECT
        group_id, sibling, seq, {_M013_PROMPT}, {_M013_RESPONSE}, logprobs, weight_versions_json,
        weight_version, temperature, finish_reason, untrainable, shaped, replica
    FROM call_rows
    """,
)
