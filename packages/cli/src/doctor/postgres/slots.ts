/** Replication slots that nobody reads from. */
import { type Check, type Finding, findings } from "../check.ts";
import { age } from "../../terminal.ts";
import { plural } from "../../text.ts";
import { type PostgresPatient, literal } from "./patient.ts";

/** A consumer that is restarted is back within that. What it leaves behind meanwhile is little. */
const idleMs = 60_000;
const heldBytes = 64 * 2 ** 20;
const heldIds = 100_000;

/**
 * `inactive_since` and `synced` came with PostgreSQL 17. One that is lost keeps nothing any more, and the copy of a primary's slot has no
 * consumer before a failover.
 */
const slots = `SELECT s.slot_name::text AS slot, s.slot_type AS type,
  coalesce(greatest(pg_catalog.age(s.xmin), pg_catalog.age(s.catalog_xmin)), 0)::text AS ids,
  coalesce(pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
    ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn), 0)::text AS bytes,
  extract(epoch FROM pg_catalog.clock_timestamp() - (pg_catalog.to_jsonb(s) ->> 'inactive_since')::timestamptz) * 1000 AS ms
FROM pg_catalog.pg_replication_slots s WHERE NOT s.active AND s.wal_status IS DISTINCT FROM 'lost'
  AND NOT coalesce((pg_catalog.to_jsonb(s) ->> 'synced')::boolean, false)
  AND (s.restart_lsn IS NOT NULL OR s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL) ORDER BY s.restart_lsn LIMIT 1000`;

export const replicationSlots: Check<PostgresPatient> = {
  id: "replication-slots",
  title: "a replication slot that nobody reads from keeps WAL, or rows that are long dead",
  async run(patient): Promise<readonly Finding[]> {
    const rows = (await patient.look(slots))
      .map((row) => ({
        slot: String(row["slot"]),
        type: String(row["type"]),
        ids: Number(row["ids"]),
        bytes: Number(row["bytes"]),
        ms: row["ms"] === null ? undefined : Number(row["ms"]),
      }))
      .filter(({ ids, bytes, ms = 0 }) => ms > idleMs || bytes > heldBytes || ids > heldIds);
    return findings(
      "warning",
      "The server keeps all of it until the consumer comes back: the disk fills up. What died since cannot be cleaned up either, if it holds transaction ids: queues and counters get slow.",
      rows.map(({ slot, type, ids, bytes, ms }) => ({
        what: `${type} replication slot ${slot} is inactive${ms === undefined ? "" : ` for ${age(ms)}`}; it keeps ${Math.round(bytes / 2 ** 20).toLocaleString("en")} MB of WAL${ids > 0 ? ` and the rows of ${plural(ids, "transaction")}` : ""}`,
        fix: `SELECT pg_drop_replication_slot(${literal(slot)});   -- only if its consumer is gone: else start that, which could not go on without it. max_slot_wal_keep_size limits what a slot may keep`,
      })),
    );
  },
};
