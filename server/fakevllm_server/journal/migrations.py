"""The migrations of the journal's schema. A released migration must not be edited, because existing
journals have run it already. Append a new migration instead."""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_runtime.migrations import Migration
from fakevllm_server.journal import prompts


def m001_tables(db: Connection) -> None:
    for statement in _M001:
        db.exec_driver_sql(statement)


def m002_drops(db: Connection) -> None:
    """Add a table with the number of dropped groups for each reason. SQL triggers update the
    numbers. The counts remain when the rows of the groups are deleted."""
    for statement in _M002:
        db.exec_driver_sql(statement)


def m003_owner(db: Connection) -> None:
    """Add a column for the owner of an episode's claim: the owner id of the API key that claimed
    the episode. Earlier claims have no owner."""
    db.exec_driver_sql("ALTER TABLE episodes ADD COLUMN owner VARCHAR NOT NULL DEFAULT ''")


def m004_idempotency(db: Connection) -> None:
    """Add idempotency keys to claims of episodes. Earlier claims have no key."""
    for column in (
        "idempotency_key VARCHAR NOT NULL DEFAULT ''",
        "body_hash BLOB NOT NULL DEFAULT x''",
    ):
        db.exec_driver_sql(f"ALTER TABLE episodes ADD COLUMN {column}")


def m005_hook_hash(db: Connection) -> None:
    """Add a column for the digest of a group's reward hooks. Earlier groups have no digest."""
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN hook_hash VARCHAR NOT NULL DEFAULT ''")


def m006_prompts(db: Connection) -> None:
    """Store long prompts as slices of compressed pieces that several calls can share. Calls that
    are stored after this migration are compressed."""
    for statement in _M006:
        db.exec_driver_sql(statement)
    prompts.move_prompts(db)


def m007_releases(db: Connection) -> None:
    """Add tables for the history of releases and for side checkpoints. A side checkpoint belongs to
    a version that is no longer part of the run, because training went back to an earlier version.
    Both tables are empty after the migration."""
    db.exec_driver_sql(
        """
        CREATE TABLE side_checkpoints (
            version INTEGER NOT NULL,
            step INTEGER NOT NULL,
            folder VARCHAR NOT NULL,
            digest VARCHAR NOT NULL,
            reward_mean FLOAT,
            at FLOAT NOT NULL,
            PRIMARY KEY (version)
        )
        """
    )
    db.exec_driver_sql(
        """
        CREATE TABLE releases (
            number INTEGER NOT NULL,
            id VARCHAR NOT NULL,
            request_hash BLOB NOT NULL,
            decision VARCHAR NOT NULL,
            version INTEGER,
            parent INTEGER,
            newest INTEGER NOT NULL,
            restored INTEGER,
            is_rollback BOOLEAN NOT NULL,
            pinned_json VARCHAR NOT NULL,
            at FLOAT NOT NULL,
            decided_by VARCHAR NOT NULL,
            evidence_json VARCHAR NOT NULL,
            PRIMARY KEY (number),
            UNIQUE (id)
        )
        """
    )


def m008_loose_pieces(db: Connection) -> None:
    """Add a table of the pieces (stored parts of prompts) that may have bytes which no prompt uses.
    At first, the table contains all pieces. Later, a trigger adds the pieces of each deleted
    prompt."""
    for statement in _M008_LOOSE_PIECES:
        db.exec_driver_sql(statement)


def m009_demonstrates(db: Connection) -> None:
    """Add a column for the demonstration loss of a group that was made from a user's edit. No
    earlier group was made from an edit."""
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN demonstrates VARCHAR")


def m010_logged(db: Connection) -> None:
    """Add whether a group is a logged group, which `fakevllm retrain` has sent. No earlier group
    counts as one."""
    db.exec_driver_sql("ALTER TABLE groups ADD COLUMN is_logged BOOLEAN NOT NULL DEFAULT 0")


MIGRATIONS: list[Migration] = [
    m001_tables,
    m002_drops,
    m003_owner,
    m004_idempotency,
    m005_hook_hash,
    m006_prompts,
    m007_releases,
    m008_loose_pieces,
    m009_demonstrates,
    m010_logged,
]


_M001 = (
    """
    CREATE TABLE episodes (
        episode_id VARCHAR NOT NULL,
        epoch INTEGER NOT NULL,
        state VARCHAR NOT NULL,
        kind VARCHAR NOT NULL,
        client_uuid VARCHAR NOT NULL,
        "key" VARCHAR NOT NULL,
        idle_limit_s FLOAT NOT NULL,
        PRIMARY KEY (episode_id)
    )
    """,
    "CREATE INDEX ix_episodes_state ON episodes (state)",
    """
    CREATE TABLE calls (
        id INTEGER NOT NULL,
        owner VARCHAR NOT NULL,
        group_id VARCHAR,
        seq INTEGER NOT NULL,
        prompt_ids BLOB NOT NULL,
        response_ids BLOB NOT NULL,
        logprobs BLOB,
        facts_json VARCHAR NOT NULL,
        digest BLOB NOT NULL,
        PRIMARY KEY (id),
        UNIQUE (owner, seq)
    )
    """,
    "CREATE INDEX ix_calls_group_id ON calls (group_id)",
    """
    CREATE TABLE samples (
        owner VARCHAR NOT NULL,
        group_id VARCHAR,
        task_id VARCHAR,
        "index" INTEGER NOT NULL,
        reward FLOAT,
        PRIMARY KEY (owner)
    )
    """,
    "CREATE INDEX ix_samples_group_id ON samples (group_id)",
    """
    CREATE TABLE groups (
        seq INTEGER NOT NULL,
        group_id VARCHAR NOT NULL,
        state VARCHAR NOT NULL,
        reason VARCHAR,
        step INTEGER,
        position INTEGER,
        advantage FLOAT,
        PRIMARY KEY (seq),
        UNIQUE (group_id)
    )
    """,
    "CREATE INDEX ix_groups_state ON groups (state)",
    "CREATE INDEX ix_groups_step ON groups (step)",
    """
    CREATE TABLE submissions (
        "key" VARCHAR NOT NULL,
        body_hash BLOB NOT NULL,
        reply_json VARCHAR NOT NULL,
        at FLOAT NOT NULL,
        PRIMARY KEY ("key")
    )
    """,
    """
    CREATE TABLE batches (
        step INTEGER NOT NULL,
        version INTEGER NOT NULL,
        groups_hash VARCHAR NOT NULL,
        state VARCHAR NOT NULL,
        PRIMARY KEY (step)
    )
    """,
    "CREATE INDEX ix_batches_state ON batches (state)",
    """
    CREATE TABLE checkpoints (
        step INTEGER NOT NULL,
        folder VARCHAR NOT NULL,
        version INTEGER NOT NULL,
        digest VARCHAR NOT NULL,
        reward_mean FLOAT,
        at FLOAT NOT NULL,
        PRIMARY KEY (step)
    )
    """,
    """
    CREATE TABLE publications (
        version INTEGER NOT NULL,
        step INTEGER NOT NULL,
        at FLOAT NOT NULL,
        PRIMARY KEY (version)
    )
    """,
    """
    CREATE TABLE entries (
        seq INTEGER NOT NULL,
        kind VARCHAR NOT NULL,
        step INTEGER NOT NULL,
        version INTEGER NOT NULL,
        entry_json VARCHAR NOT NULL,
        PRIMARY KEY (seq)
    )
    """,
    'CREATE TABLE meta ("key" VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY ("key"))',
)

_SLUG = "substr({0}, 1, instr({0} || ':', ':') - 1)"
"""SQL for the part of a reason before its first colon."""
_COUNT = f"""
    INSERT INTO drops VALUES ({_SLUG.format("COALESCE(NEW.reason, '')")}, 1)
    ON CONFLICT (reason) DO UPDATE SET num = num + 1;
"""
_M002 = (
    "CREATE TABLE drops (reason VARCHAR NOT NULL, num INTEGER NOT NULL, PRIMARY KEY (reason))",
    f"""
    INSERT INTO drops SELECT {_SLUG.format("COALESCE(reason, '')")}, COUNT(*) FROM groups
    WHERE state = 'dropped' GROUP BY 1
    """,
    f"""
    CREATE TRIGGER count_dropped AFTER INSERT ON groups WHEN NEW.state = 'dropped'
    BEGIN {_COUNT} END
    """,
    f"""
    CREATE TRIGGER count_dropped_later AFTER UPDATE OF state ON groups
    WHEN NEW.state = 'dropped' AND OLD.state <> 'dropped'
    BEGIN {_COUNT} END
    """,
)

_M006 = (
    """
    CREATE TABLE prompts (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
        slices VARCHAR NOT NULL,
        num_calls INTEGER NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE pieces (
        piece_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
        data BLOB NOT NULL,
        num_prompts INTEGER NOT NULL DEFAULT 0
    )
    """,
    "ALTER TABLE calls ADD COLUMN prompt INTEGER",
    "ALTER TABLE calls ADD COLUMN is_compressed BOOLEAN NOT NULL DEFAULT 0",
    "CREATE INDEX ix_calls_prompt ON calls (prompt)",
    """
    CREATE TRIGGER count_call AFTER INSERT ON calls WHEN NEW.prompt IS NOT NULL
    BEGIN UPDATE prompts SET num_calls = num_calls + 1 WHERE id = NEW.prompt; END
    """,
    """
    CREATE TRIGGER count_moved_call AFTER UPDATE OF prompt ON calls
    WHEN OLD.prompt IS NULL AND NEW.prompt IS NOT NULL
    BEGIN UPDATE prompts SET num_calls = num_calls + 1 WHERE id = NEW.prompt; END
    """,
    """
    CREATE TRIGGER count_deleted_call AFTER DELETE ON calls WHEN OLD.prompt IS NOT NULL
    BEGIN
        UPDATE prompts SET num_calls = num_calls - 1 WHERE id = OLD.prompt;
        DELETE FROM prompts WHERE id = OLD.prompt AND num_calls = 0;
    END
    """,
    """
    CREATE TRIGGER count_prompt AFTER INSERT ON prompts
    BEGIN
        UPDATE pieces SET num_prompts = num_prompts + 1 WHERE piece_id IN
        (SELECT json_extract(value, '$[0]') FROM json_each(NEW.slices));
    END
    """,
    """
    CREATE TRIGGER count_deleted_prompt AFTER DELETE ON prompts
    BEGIN
        UPDATE pieces SET num_prompts = num_prompts - 1 WHERE piece_id IN
        (SELECT json_extract(value, '$[0]') FROM json_each(OLD.slices));
        DELETE FROM pieces WHERE num_prompts = 0 AND piece_id IN
        (SELECT json_extract(value, '$[0]') FROM json_each(OLD.slices));
    END
    """,
)

_M008_LOOSE_PIECES = (
    """
    CREATE TABLE loose_pieces (
        piece_id INTEGER NOT NULL,
        num_deleted INTEGER NOT NULL,
        PRIMARY KEY (piece_id)
    )
    """,
    "INSERT INTO loose_pieces SELECT piece_id, 1 FROM pieces",
    """
    CREATE TRIGGER loosen_pieces AFTER DELETE ON prompts
    BEGIN
        INSERT INTO loose_pieces SELECT piece_id, 1 FROM pieces WHERE piece_id IN
        (SELECT json_extract(value, '$[0]') FROM json_each(OLD.slices))
        ON CONFLICT (piece_id) DO UPDATE SET num_deleted = num_deleted + 1;
    END
    """,
    """
    CREATE TRIGGER forget_loose_piece AFTER DELETE ON pieces
    BEGIN DELETE FROM loose_pieces WHERE piece_id = OLD.piece_id; END
    """,
)
