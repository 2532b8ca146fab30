"""The migrations that create the tables of the ledger and change them.

A released migration is never edited, because existing ledgers have already applied it. Add each
change of the tables as a new migration at the end.
"""

from __future__ import annotations

from sqlalchemy import Connection

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
    # Holds all that a proxy reads at its start: a row's own columns lie behind a whole request.
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
