import { setTimeout as sleep } from "node:timers/promises";
import type { Transaction } from "holdfast";
import { type TransactionalJob, queue } from "holdfast/queue";
import type { ClientBase, Pool } from "pg";
import { type Race, type Stage, failureText, failures, one, sentence, work } from "./race.ts";

/** Jobs. */
const total = 200;

interface Mail {
  readonly id: number;
}

async function send(db: Pick<ClientBase, "query"> | Pool, mail: Mail): Promise<void> {
  await work();
  await (db as Pool).query("INSERT INTO sent (mail) VALUES ($1)", [mail.id]);
}

async function firstNew(pool: Pool): Promise<Mail | undefined> {
  const { rows } = await pool.query<Mail>("SELECT id FROM mail WHERE status = 'new' ORDER BY id LIMIT 1");
  return rows[0];
}

const mark = (pool: Pool, { id }: Mail, status: string): Promise<unknown> =>
  pool.query("UPDATE mail SET status = $2 WHERE id = $1", [id, status]);

/** Works until there is nothing more to do, or until it fails. */
async function naive({ pool, setting, call, progress }: Stage): Promise<void> {
  let more = true;
  const workOnOne = async (): Promise<void> => {
    const mail = await firstNew(pool); // SELECT … LIMIT 1
    if (!mail) {
      more = false;
      return;
    }
    await mark(pool, mail, "running"); // UPDATE
    await send(pool, mail);
    await mark(pool, mail, "done");
    // They are taken in the order of their ids.
    progress(mail.id);
  };
  const worker = async (): Promise<void> => {
    while (more) if (!(await call(workOnOne))) return;
  };
  await Promise.all(Array.from({ length: setting.callers }, worker));
}

const sendMail = (job: TransactionalJob<Mail>, tx: Transaction<ClientBase>): Promise<void> =>
  send(tx.client, job.payload);

async function exact({ hf, setting: { callers: concurrency }, progress }: Stage): Promise<void> {
  const mails = queue<Mail>(hf, "mails");
  const inTransaction = { transactional: true, concurrency } as const;
  const worker = mails.work(sendMail, inTransaction);
  try {
    for (;;) {
      const { waiting, running } = await mails.counts();
      progress(total - waiting - running);
      if (waiting + running === 0) return;
      await sleep(50);
    }
  } finally {
    await worker.stop();
  }
}

export const jobs: Race = {
  name: "jobs",
  title: "Jobs that run twice",
  what: ({ processes, callers }) =>
    `${total} mails wait to be sent, and ${processes * callers} workers send them. The code looks for the first one that is new (SELECT … LIMIT 1), marks it (UPDATE) and sends it.`,
  counts: "mails sent",
  total: () => total,
  does: "jobs",
  timed: true,
  shared: true,
  tables: `
    CREATE TABLE mail (id int PRIMARY KEY, status text NOT NULL);
    CREATE INDEX ON mail (status, id);
    CREATE TABLE sent (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, mail int NOT NULL)`,
  async reset({ pool, hf }, way) {
    await pool.query("TRUNCATE mail, sent");
    const ids = Array.from({ length: total }, (_, i) => i + 1);
    if (way === "Holdfast queue")
      await queue<Mail>(hf, "mails").enqueueMany(ids.map((id) => ({ payload: { id } })));
    else await pool.query("INSERT INTO mail (id, status) SELECT unnest($1::int[]), 'new'", [ids]);
  },
  ways: [
    {
      name: "naive",
      code: [
        "const mail = await firstNew(pool); // SELECT … LIMIT 1",
        'await mark(pool, mail, "running"); // UPDATE',
        "await send(pool, mail);",
      ],
      why: "Several find the same mail before the first of them has marked it.",
      run: naive,
    },
    {
      name: "Holdfast queue",
      code: [
        'const mails = queue<Mail>(hf, "mails");',
        "const inTransaction = { transactional: true, concurrency } as const;",
        "const worker = mails.work(sendMail, inTransaction);",
      ],
      why: "A job is one worker’s. It is done when what the worker wrote is committed.",
      run: exact,
    },
  ],
  async find({ pool }, _, tally) {
    const { counted, mails, most } = await one<{ counted: number; mails: number; most: number }>(
      pool,
      `SELECT coalesce(sum(n), 0)::int AS counted, count(*)::int AS mails, coalesce(max(n), 0)::int AS most
       FROM (SELECT count(*) AS n FROM sent GROUP BY mail) AS per_mail`,
    );
    return {
      counted,
      expected: total,
      right: counted === total && most === 1 && failures(tally) === 0,
      text: sentence(
        `${counted} mails of ${total}`,
        most > 1 && `one ${most} times`,
        mails < total && `${total - mails} never`,
        failureText(tally),
      ),
      facts: { mostOfOne: most },
    };
  },
};
