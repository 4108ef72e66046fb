import { type Holdfast, key } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const quotaBytes = 1_000;

class QuotaExceeded extends Error {}

/** Check, then write: exact, because the lock is one per user and is held until COMMIT. */
async function upload(hf: Holdfast<ClientBase>, userId: number, bytes: number): Promise<void> {
  await hf.transaction({ lock: key("upload", userId) }, async (tx) => {
    const { rows } = await tx.client.query<{ used: number }>(
      "SELECT coalesce(sum(bytes), 0)::int AS used FROM holdfast_example_image WHERE user_id = $1",
      [userId],
    );
    if ((rows[0]?.used ?? 0) + bytes > quotaBytes) throw new QuotaExceeded();
    await tx.client.query("INSERT INTO holdfast_example_image (user_id, bytes) VALUES ($1, $2)", [
      userId,
      bytes,
    ]);
  });
}

export interface Result {
  readonly granted: number;
  readonly refused: number;
  /** As the table has it. */
  readonly usedBytes: number;
}

/** A hundred uploads of one user at once, of which ten fit. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    holdfast_example_image: "user_id bigint NOT NULL, bytes int NOT NULL",
  });
  const { pool, hf } = place;
  const uploads = Array.from({ length: 100 }, () => upload(hf, 42, 100));
  const outcomes = await Promise.allSettled(uploads);
  for (const outcome of outcomes) {
    if (outcome.status === "rejected" && !(outcome.reason instanceof QuotaExceeded)) throw outcome.reason;
  }
  const granted = outcomes.filter(({ status }) => status === "fulfilled").length;
  const { rows } = await pool.query<{ used: number }>(
    "SELECT coalesce(sum(bytes), 0)::int AS used FROM holdfast_example_image",
  );
  return { granted, refused: outcomes.length - granted, usedBytes: rows[0]?.used ?? 0 };
}

await command(
  import.meta.url,
  main,
  ({ granted, refused, usedBytes }) =>
    `${granted} uploads granted, ${refused} refused; ${usedBytes} of ${quotaBytes} bytes used`,
);
