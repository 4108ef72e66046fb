/** The public calls whose cost is held, each as small as it can be. */
import { type Holdfast, key, once, sql, versioned } from "holdfast";
import { audited } from "holdfast/audit";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { type ConformanceSite, execute } from "holdfast/testing";

export interface Ground {
  readonly hf: Holdfast<unknown>;
  readonly site: ConformanceSite;
  /** Sends an INSERT through the client's own transaction. */
  insert(native: unknown): Promise<unknown>;
}

export interface Started {
  run(): PromiseLike<unknown>;
  /** The call does part of its work after its promise is settled. The next run waits for that. */
  readonly goesOn?: boolean;
  stop?(): Promise<void>;
}

export interface Call {
  readonly name: string;
  start(ground: Ground): Started | Promise<Started>;
}

// What is sent keeps its length, however often it was sent before.
let made = 100_000;
const next = (): number => made++;
const plenty = 500_000_000;

const lock = key("upload", 1);

export async function createTables(site: ConformanceSite): Promise<void> {
  await execute(site, sql`CREATE TABLE upload (user_id varchar(40) NOT NULL, bytes integer NOT NULL)`);
  await execute(
    site,
    sql`CREATE TABLE account (id integer NOT NULL PRIMARY KEY, balance integer NOT NULL, version integer NOT NULL)`,
  );
  for (const id of [1, 2, 3]) await execute(site, sql`INSERT INTO account VALUES (${id}, 0, ${next()})`);
}

const starts: Readonly<Record<string, Call["start"]>> = {
  // Without Holdfast: the part of the others that is the client's own.
  "by hand: BEGIN, INSERT, COMMIT": ({ site, insert }) => ({ run: () => site.ownTransaction(insert) }),

  "hf.transaction, empty": ({ hf }) => ({ run: () => hf.transaction(async () => {}) }),
  "hf.transaction, INSERT": ({ hf, insert }) => ({
    run: () => hf.transaction((tx) => insert(tx.client)),
  }),
  "hf.transaction, INSERT by tx.query": ({ hf }) => {
    const statement = sql`INSERT INTO upload (user_id, bytes) VALUES (${"ada"}, ${1})`;
    return { run: () => hf.transaction((tx) => tx.query(statement)) };
  },
  "hf.transaction with a lock, INSERT": ({ hf, insert }) => ({
    run: () => hf.transaction({ lock }, (tx) => insert(tx.client)),
  }),
  "hf.lock, INSERT": ({ hf, insert }) => ({ run: () => hf.lock(lock, (tx) => insert(tx.client)) }),
  "hf.tryLock, INSERT": ({ hf, insert }) => ({ run: () => hf.tryLock(lock, (tx) => insert(tx.client)) }),
  "hf.transaction, INSERT, tx.lock": ({ hf, insert }) => ({
    run: () =>
      hf.transaction(async (tx) => {
        await insert(tx.client);
        await tx.lock(lock);
      }),
  }),
  "hf.transaction, tx.transaction, INSERT": ({ hf, insert }) => ({
    run: () => hf.transaction((tx) => tx.transaction((inner) => insert(inner.client))),
  }),
  "hf.join, lock": ({ hf, site }) => ({
    run: () => site.ownTransaction((native) => hf.join(native).lock(lock)),
  }),
  "hf.hold, release": ({ hf }) => ({
    async run() {
      const held = await hf.hold(lock);
      await held.release();
    },
  }),

  "hf.transactionSync with a lock, INSERT": ({ hf }) => {
    const statement = sql`INSERT INTO upload (user_id, bytes) VALUES (${"ada"}, ${1})`;
    return {
      run: () => Promise.resolve(hf.transactionSync({ lock }, (tx) => tx.query(statement))),
    };
  },

  "hf.transaction, tx.row": ({ hf }) => ({ run: () => hf.transaction((tx) => tx.row("account", 1)) }),
  "hf.transaction, tx.rows of two": ({ hf }) => ({
    run: () => hf.transaction((tx) => tx.rows("account", [1, 2])),
  }),
  "versioned.update": ({ hf }) => {
    const accounts = versioned<{ id: number; balance: number; version: number }, unknown>(hf, "account");
    return { run: () => accounts.update(3, ({ balance }) => ({ balance: 1 - balance })) };
  },

  "hf.lease, release": ({ hf }) => ({
    async run() {
      const lease = await hf.lease(key("export", 1));
      await lease.release();
    },
  }),
  "semaphore.acquire, release": ({ hf }) => {
    const places = hf.semaphore(key("render"), { permits: 5 });
    return {
      async run() {
        const permit = await places.acquire();
        await permit.release();
      },
    };
  },
  "once, INSERT": ({ hf, insert }) => ({
    run: () => once(hf, ["payments", next()], async (tx) => void (await insert(tx.client))),
  }),
  "once, again": ({ hf, insert }) => ({
    run: () => once(hf, ["payments", "same"], async (tx) => void (await insert(tx.client))),
  }),

  "quota.consume": ({ hf }) => {
    const uploads = quota(hf, { name: "uploads", limit: plenty });
    return { run: () => uploads.consume("ada") };
  },
  "quota.hold, settle": ({ hf }) => {
    const credits = quota(hf, { name: "credits", limit: plenty });
    return {
      async run() {
        const hold = await credits.hold("ada", 2);
        await hold.settle(1);
      },
    };
  },
  "stock.decrease": async ({ hf }) => {
    const shelf = stock(hf);
    await shelf.increase("CAP", plenty);
    return { run: () => shelf.decrease("CAP", 1) };
  },
  "stock.apply of two": async ({ hf }) => {
    const shelf = stock(hf);
    await shelf.increase("MUG", plenty);
    await shelf.increase("PEN", plenty);
    const lines = [
      { sku: "MUG", quantity: -1 },
      { sku: "PEN", quantity: -1 },
    ];
    return { run: () => shelf.apply(lines) };
  },

  "queue.enqueue": ({ hf }) => {
    const emails = queue<{ to: string }>(hf, "emails");
    return { run: () => emails.enqueue({ to: "ada" }) };
  },
  "queue.work, one job": ({ hf }) => work(hf, "cycle", false),
  "queue.work, one transactional job": ({ hf }) => work(hf, "transactional", true),
  "schedule.runNow": ({ hf }) => {
    const report = schedule(hf, "report", { every: "1 day" }, () => {});
    return { run: () => report.runNow() };
  },
  audited: ({ hf }) => ({
    run: () => audited(hf, { action: "grant", target: "ada", actor: "bob" }, async () => {}),
  }),
};

/** A run begins when a job's handler ends, and ends when the next job's handler begins: one job is ended, and one claimed. */
async function work(hf: Holdfast<unknown>, name: string, transactional: boolean): Promise<Started> {
  const of = queue<{ n: number }>(hf, name);
  await of.enqueueMany(Array.from({ length: 200 }, () => ({ payload: { n: 1 } })));
  let began = Promise.withResolvers<void>();
  let goOn = () => {};
  const first = began;
  const handler = () => {
    const ended = Promise.withResolvers<void>();
    goOn = ended.resolve;
    began.resolve();
    return ended.promise;
  };
  const options = { concurrency: 1, batch: 1 } as const;
  const worker = transactional
    ? of.work(handler, { ...options, transactional: true })
    : of.work(handler, options);
  await first.promise;
  return {
    run() {
      began = Promise.withResolvers();
      goOn();
      return began.promise;
    },
    goesOn: true,
    async stop() {
      const stopped = worker.stop();
      goOn();
      await stopped;
    },
  };
}

export const calls: readonly Call[] = Object.entries(starts).map(([name, start]) => ({ name, start }));
