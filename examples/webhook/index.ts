import { type Holdfast, OnceError, once } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const accounts = "holdfast_example_credit";
const payments = "holdfast_example_payment";
const day = 86_400_000;

interface PaymentEvent {
  readonly id: string;
  /** Seconds. */
  readonly created: number;
  readonly account: string;
  readonly credits: number;
}

interface Answer {
  readonly status: number;
  readonly body?: unknown;
}

/**
 * Senders repeat themselves until they have seen a 200. The credits are added once; every repetition gets the answer
 * of the first, also one that comes while the first is still at it.
 */
async function webhook(hf: Holdfast<ClientBase>, event: PaymentEvent): Promise<Answer> {
  const { id, created, ...payload } = event;
  try {
    const { value } = await once(
      hf,
      ["payments", id],
      async (tx) => {
        await tx.client.query(`UPDATE ${accounts} SET credits = credits + $2 WHERE id = $1`, [
          event.account,
          event.credits,
        ]);
        const { rows } = await tx.client.query<{ id: number }>(
          `INSERT INTO ${payments} (account, credits) VALUES ($1, $2) RETURNING id`,
          [event.account, event.credits],
        );
        return { payment: rows[0]?.id ?? null };
      },
      { payload, issuedAt: new Date(created * 1000), keepFor: 30 * day },
    );
    return { status: 200, body: value };
  } catch (error) {
    // Another message under the same id, or one that is too old to know: not to be repeated as it is.
    if (error instanceof OnceError) return { status: 422, body: error.code };
    throw error;
  }
}

export interface Result {
  readonly together: readonly Answer[];
  readonly later: Answer;
  readonly forged: Answer;
  /** As the tables have it. */
  readonly credits: number;
  readonly payments: number;
}

/** An event that is delivered five times at once, once more later, and once with another amount. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    [accounts]: "id text PRIMARY KEY, credits int NOT NULL",
    [payments]: "id int GENERATED ALWAYS AS IDENTITY, account text NOT NULL, credits int NOT NULL",
  });
  const { pool, hf } = place;
  // Holdfast's own tables, which stay: the records are in one of them.
  await hf.migrate();
  await pool.query(`INSERT INTO ${accounts} VALUES ('ada', 0)`);
  const created = Math.floor(Date.now() / 1000);
  const event: PaymentEvent = { id: `evt_${crypto.randomUUID()}`, created, account: "ada", credits: 100 };
  const together = await Promise.all(Array.from({ length: 5 }, () => webhook(hf, event)));
  const later = await webhook(hf, event);
  const forged = await webhook(hf, { ...event, credits: 1_000_000 });
  const { rows } = await pool.query<{ credits: number; payments: number }>(
    `SELECT credits, (SELECT count(*)::int FROM ${payments}) AS payments FROM ${accounts}`,
  );
  return { together, later, forged, credits: rows[0]?.credits ?? 0, payments: rows[0]?.payments ?? 0 };
}

await command(
  import.meta.url,
  main,
  ({ together, later, forged, credits, payments: made }) =>
    `${together.length + 1} deliveries answered ${[...new Set([...together, later].map(({ status }) => status))].join(", ")}: ` +
    `${made} payment, ${credits} credits. The forged one got ${forged.status}`,
);
