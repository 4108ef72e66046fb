import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, sql } from "holdfast";
import { type Job, type Queue, type Worker, queue } from "holdfast/queue";
import { type Database, connect, open } from "../database.ts";
import { command } from "../support.ts";
import { Smtp, SmtpError } from "./smtp.ts";

interface Email {
  readonly kind: "confirmation" | "receipt";
  readonly order: number;
  readonly to: string;
}

class Declined extends Error {}

/** Both sides define it: the web server enqueues, workers send. */
function emails(hf: Holdfast<unknown>, name: string): Queue<Email> {
  return queue<Email>(hf, name, {
    retries: 5,
    // Who says never is not asked again; the job is with the failed ones at once.
    backoff: (failures, error) =>
      error instanceof SmtpError && !error.passing ? undefined : 50 * 2 ** failures,
  });
}

/** The order and its e-mail are committed together: no order without a confirmation, no confirmation without an order. */
async function checkout(
  { hf }: Database,
  mails: Queue<Email>,
  order: number,
  to: string,
  pay: () => Promise<void>,
): Promise<void> {
  await hf.transaction(async (tx) => {
    await tx.query(sql`INSERT INTO holdfast_example_order (id, email) VALUES (${order}, ${to})`);
    await mails.enqueue({ kind: "confirmation", order, to }, { tx });
    // If this throws, neither is there.
    await pay();
  });
}

/** A button that is clicked twice, or five times: while one e-mail waits or is being sent, there is no second. */
async function sendReceipt(mails: Queue<Email>, order: number, to: string): Promise<boolean> {
  const { added } = await mails.enqueue({ kind: "receipt", order, to }, { key: `receipt-${order}` });
  return added;
}

/**
 * What is sent cannot be taken back, so a process that dies right after it sends again: the Message-ID is the same, and
 * the reader's program shows one. What is written here is written exactly once, together with the end of the job.
 */
async function deliver({ hf }: Database, smtp: Smtp, job: Job<Email>): Promise<void> {
  const { kind, order, to } = job.payload;
  await smtp.send({ messageId: `<${kind}-${order}@shop.example>`, to, subject: `Your ${kind}` });
  await hf.transaction(async (tx) => {
    await tx.query(sql`UPDATE holdfast_example_order SET mails = mails + 1 WHERE id = ${order}`);
    await job.complete(tx);
  });
}

export interface Result {
  readonly orders: number;
  readonly declined: number;
  readonly clicks: number;
  readonly receipts: number;
  readonly sent: number;
  /** As the orders' table has it: the same. */
  readonly written: number;
  readonly twice: number;
  readonly putOff: number;
  readonly failed: readonly string[];
}

/** Thirty checkouts, of which six are declined; ten customers click three times; three workers send. */
export async function main(url: string): Promise<Result> {
  await using database = await open(url, {
    holdfast_example_order: "id int PRIMARY KEY, email varchar(100) NOT NULL, mails int NOT NULL DEFAULT 0",
  });
  const { hf, query } = database;
  await hf.migrate();
  // Another name each time: a run that was killed has left its jobs.
  const name = `emails-${randomUUID()}`;
  const mails = emails(hf, name);

  const addressOf = (order: number) =>
    order === 7 ? "nobody@shop.example" : `ada-${order}@${order % 4 === 0 ? "grey" : "mail"}.example`;
  const checkouts = await Promise.allSettled(
    Array.from({ length: 30 }, (_, order) =>
      checkout(database, mails, order, addressOf(order), async () => {
        if (order % 5 === 4) throw new Declined("the card was declined");
      }),
    ),
  );
  const errors = checkouts.flatMap((each) => (each.status === "rejected" ? [each.reason as unknown] : []));
  const declined = errors.filter((error) => error instanceof Declined).length;
  // Anything else is not what this is about.
  if (declined < errors.length) throw new AggregateError(errors, "checkouts failed");
  const customers = [0, 1, 2, 3, 5, 6, 8, 10, 11, 12];
  const clicks = await Promise.all(
    [...customers, ...customers, ...customers].map((order) => sendReceipt(mails, order, addressOf(order))),
  );

  // As if in three processes: each with a pool and an instance of its own.
  const smtp = new Smtp();
  const crew = Array.from({ length: 3 }, () => startWorker(url, name, smtp));
  try {
    for (;;) {
      const { waiting, delayed, running } = await mails.counts();
      if (waiting + delayed + running === 0) break;
      await sleep(20);
    }
  } finally {
    await Promise.all(crew.map((each) => each.stop()));
  }

  const failed = await mails.failed();
  if (failed.length > 0) await mails.discard(failed.map(({ id }) => id));
  const [row] = await query<{ orders: number; written: number }>(sql`
    SELECT count(*) AS orders, sum(mails) AS written FROM holdfast_example_order`);
  const sent = smtp.accepted.length;
  return {
    orders: Number(row?.orders),
    declined,
    clicks: clicks.length,
    receipts: clicks.filter(Boolean).length,
    sent,
    written: Number(row?.written),
    twice: sent - new Set(smtp.accepted.map(({ messageId }) => messageId)).size,
    putOff: smtp.putOff,
    failed: failed.map(({ error }) => error.split("\n")[0] ?? ""),
  };
}

function startWorker(url: string, name: string, smtp: Smtp): Pick<Worker, "stop"> {
  const database = connect(url);
  const worker = emails(database.hf, name).work((job) => deliver(database, smtp, job), { concurrency: 5 });
  return {
    async stop() {
      await worker.stop();
      await database[Symbol.asyncDispose]();
    },
  };
}

await command(
  import.meta.url,
  main,
  ({ orders, declined, clicks, receipts, sent, twice, putOff, failed }) =>
    `${orders} orders and ${declined} declined, ${clicks} clicks for ${receipts} receipts: ` +
    `${sent} e-mails, ${twice} of them twice; ${putOff} had to come again, ${failed.length} could not be delivered`,
);
