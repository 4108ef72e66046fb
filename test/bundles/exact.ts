/** An application that is bundled whole: a quota of ten, and forty that want one at once; and some of everything else. */
import { fenced, holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { nextRuns } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Pool } from "pg";

export interface Found {
  readonly granted: number;
  readonly used: number;
  /** Of ten that locked, read and wrote. */
  readonly counted: number;
  readonly waiting: number;
  readonly onHand: number;
  readonly next: string | undefined;
}

export async function exact(connectionString: string): Promise<Found> {
  const pool = new Pool({ connectionString, max: 5 });
  const hf = holdfast(fromPg(pool));
  try {
    await hf.migrate();
    const uploads = quota(hf, { name: "uploads", limit: 10 });
    // Half of them in batches, and half in transactions with a connection each.
    const calls = Array.from({ length: 40 }, (_, i) =>
      i % 2 === 0 ? uploads.tryConsume("ada") : hf.transaction((tx) => uploads.tryConsume("ada", 1, { tx })),
    );
    const granted = (await Promise.all(calls)).filter((each) => each.granted).length;

    await pool.query("CREATE TABLE tally (n int NOT NULL); INSERT INTO tally VALUES (0)");
    const count = () =>
      hf.lock(key("tally"), async ({ client }) => {
        const { rows } = await client.query<{ n: number }>("SELECT n FROM tally");
        await client.query("UPDATE tally SET n = $1", [Number(rows[0]?.n) + 1]);
      });
    await Promise.all(Array.from({ length: 10 }, count));
    const { rows } = await pool.query<{ n: number }>("SELECT n FROM tally");

    const lease = await hf.lease(key("report"));
    await hf.transaction((tx) => fenced(tx, lease));
    await lease.release();
    const emails = queue(hf, "emails");
    await emails.enqueue({ to: "ada" });
    const shelf = stock(hf);
    await shelf.increase("CAP", 3);
    const [next] = await nextRuns({ every: "1 hour" }, 1, new Date(0));
    return {
      granted,
      used: (await uploads.peek("ada")).used,
      counted: Number(rows[0]?.n),
      waiting: (await emails.counts()).waiting,
      onHand: (await shelf.level("CAP")).onHand,
      next: next?.toISOString(),
    };
  } finally {
    await hf.close();
    await pool.end();
  }
}
