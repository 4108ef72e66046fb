/** An upload that checks the quota, then writes: without a lock, and with one. */
import assert from "node:assert/strict";
import { key } from "holdfast";
import { fromPg } from "holdfast/pg";
import type { ClientBase } from "pg";
import { type Place, open } from "../support.ts";

const quotaBytes = 100;
const userId = 42;

class QuotaExceeded extends Error {}

async function upload(client: ClientBase, bytes: number): Promise<void> {
  const { rows } = await client.query<{ used: number }>(
    "SELECT coalesce(sum(bytes), 0)::int AS used FROM holdfast_example_upload WHERE user_id = $1",
    [userId],
  );
  if ((rows[0]?.used ?? 0) + bytes > quotaBytes) throw new QuotaExceeded();
  await client.query("INSERT INTO holdfast_example_upload (user_id, bytes) VALUES ($1, $2)", [userId, bytes]);
}

/** As it is often written: each of the two is in a transaction. */
async function inTransaction({ pool }: Place): Promise<void> {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    await upload(client, 60);
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

const underLock = ({ hf }: Place) =>
  hf.transaction({ lock: key("upload", userId) }, (tx) => upload(tx.client, 60));

/** Two uploads of 60 bytes at the same time, of which one fits. */
async function twoUploads(url: string, act: (place: Place) => Promise<void>) {
  const place = await open(url, { holdfast_example_upload: "user_id bigint NOT NULL, bytes int NOT NULL" });
  const { pool } = place;
  return {
    db: fromPg(pool),
    reset: () => pool.query("DELETE FROM holdfast_example_upload"),
    actors: { A: () => act(place), B: () => act(place) },
    invariant: async () => {
      const { rows } = await pool.query<{ used: number }>(
        "SELECT coalesce(sum(bytes), 0)::int AS used FROM holdfast_example_upload",
      );
      const used = rows[0]?.used ?? 0;
      assert.ok(used <= quotaBytes, `${used} of ${quotaBytes} bytes are used`);
    },
    close: () => place[Symbol.asyncDispose](),
  };
}

export const naive = ({ url }: { url: string }) => twoUploads(url, inTransaction);
export const locked = ({ url }: { url: string }) => twoUploads(url, underLock);
