import assert from "node:assert/strict";
import type { Sql } from "postgres";
import { type Race, number, postgresOnly } from "./race.ts";

/** However long it is, some day the work takes longer: what another one finds then is a lock that has run out. */
const TTL = "0 seconds";

async function acquire(sql: Sql, key: string, owner: string): Promise<void> {
  const rows = await sql`
    INSERT INTO lease (key, owner, expires_at) VALUES (${key}, ${owner}, clock_timestamp() + ${TTL}::interval)
    ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at
    WHERE lease.expires_at <= clock_timestamp()
    RETURNING owner`;
  if (rows.length === 0) throw new Error("Somebody else is at it");
}

async function release(sql: Sql, key: string, owner: string): Promise<void> {
  await sql`DELETE FROM lease WHERE key = ${key} AND owner = ${owner}`;
}

async function naive(sql: Sql, uri: string, request: string): Promise<void> {
  await acquire(sql, uri, request);
  try {
    const known = await sql`SELECT uri FROM status WHERE uri = ${uri}`;
    if (known.length === 0) await sql`INSERT INTO status (uri, fetched_by) VALUES (${uri}, ${request})`;
  } finally {
    await release(sql, uri, request);
  }
}

/** The write counts only while the lease is ours, and nobody can take it over between the look and COMMIT. */
async function fixed(sql: Sql, uri: string, request: string): Promise<void> {
  await acquire(sql, uri, request);
  try {
    const known = await sql`SELECT uri FROM status WHERE uri = ${uri}`;
    if (known.length > 0) return;
    await sql.begin(async (tx) => {
      const ours = await tx`SELECT owner FROM lease WHERE key = ${uri} AND owner = ${request} FOR UPDATE`;
      if (ours.length === 0) throw new Error("The lease was lost");
      await tx`INSERT INTO status (uri, fetched_by) VALUES (${uri}, ${request})`;
    });
  } finally {
    await release(sql, uri, request);
  }
}

const uri = "https://example.com/users/ada/statuses/1";

export const expiredLock: Race = {
  title: "a lock runs out before the work is done",
  source: "mastodon 15645",
  client: "postgres",
  engines: postgresOnly,
  tables: {
    lease: "key text PRIMARY KEY, owner text NOT NULL, expires_at timestamptz NOT NULL",
    status: "uri text NOT NULL, fetched_by text NOT NULL",
  },
  rows: [],
  naive: { actors: ({ sql }) => ({ A: () => naive(sql, uri, "A"), B: () => naive(sql, uri, "B") }) },
  fixed: { actors: ({ sql }) => ({ A: () => fixed(sql, uri, "A"), B: () => fixed(sql, uri, "B") }) },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM status"), 1, "statuses with this uri");
  },
  expects: "phantom",
};
