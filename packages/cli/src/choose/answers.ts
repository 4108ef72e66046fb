/**
 * What is answered: for each thing that is checked and each length of work, one tool with its code. The code is written for all
 * databases alike; `open.ts` has what comes before it.
 */
import type { Database, Long, What } from "./questions.ts";

/** A capability of the library, as `hf.capabilities()` names it. */
export type Need =
  | "transactionLocks"
  | "rowLocks"
  | "leases"
  | "versions"
  | "once"
  | "quotas"
  | "stock"
  | "queues"
  | "schedules";

export interface Tool {
  /** What to use, in a few words. */
  readonly use: string;
  readonly why: string;
  /** What the database must be able to do. */
  readonly needs: readonly Need[];
  /** Names that the code takes from `holdfast` and its subpaths. */
  readonly imports: Readonly<Record<string, string>>;
  readonly code: string;
  /** A page of docs/, with the place in it. */
  readonly page: string;
  /** In place of it where the database lacks what it needs. */
  readonly otherwise?: Tool;
}

const limit: Tool = {
  use: "quota(hf, …).consume",
  why: "Counted in one round trip, exact across processes; the same id counts once.",
  needs: ["quotas"],
  imports: { quota: "holdfast/quota" },
  code: `const uploads = quota(hf, { name: "uploads", limit: 100, per: "day" });

export async function upload(userId: string, requestId: string): Promise<boolean> {
  const { granted } = await uploads.tryConsume(userId, 1, { id: requestId });
  return granted;
}`,
  page: "quota.md",
};

const limitHeld: Tool = {
  use: "quota(hf, …).hold, then settle",
  why: "The most that it may cost is kept apart, without a lock; what it did cost is settled, and the rest is given back.",
  needs: ["quotas"],
  imports: { quota: "holdfast/quota" },
  code: `const tokens = quota(hf, { name: "tokens", limit: 100_000, per: "day" });

export async function ask(userId: string, model: () => Promise<{ tokens: number }>) {
  const hold = await tokens.hold(userId, 4_000, { holdFor: 10 * 60_000 });
  try {
    const answer = await model();
    await hold.settle(answer.tokens);
    return answer;
  } catch (error) {
    await hold.release();
    throw error;
  }
}`,
  page: "quota.md#giving-back",
};

const credits: Tool = {
  use: "quota(hf, …) with limit 0, and grant",
  why: "Credits that were bought are on top of a limit of 0: never spent twice, with an end, and with a ledger.",
  needs: ["quotas"],
  imports: { quota: "holdfast/quota" },
  code: `const credits = quota(hf, { name: "credits", limit: 0 });

export async function bought(userId: string, amount: number, paymentId: string): Promise<void> {
  await credits.grant(userId, amount, { id: paymentId });
}

export async function spend(userId: string, amount: number, requestId: string): Promise<boolean> {
  const { granted } = await credits.tryConsume(userId, amount, { id: requestId });
  return granted;
}`,
  page: "quota.md#credits",
};

const creditsHeld: Tool = {
  ...credits,
  use: "quota(hf, …) with limit 0, and hold, then settle",
  why: "The most that it may cost is kept apart, without a lock; what it did cost is settled, and the rest is given back.",
  code: `const credits = quota(hf, { name: "credits", limit: 0 });

export async function bought(userId: string, amount: number, paymentId: string): Promise<void> {
  await credits.grant(userId, amount, { id: paymentId });
}

export async function spend(userId: string, most: number, work: () => Promise<number>): Promise<void> {
  const hold = await credits.hold(userId, most, { holdFor: 10 * 60_000 });
  try {
    await hold.settle(await work());
  } catch (error) {
    await hold.release();
    throw error;
  }
}`,
};

const goods: Tool = {
  use: "stock(hf).apply",
  why: "Orders of many SKUs are taken whole or not at all; a notification that comes twice counts once.",
  needs: ["stock"],
  imports: { stock: "holdfast/stock" },
  code: `const shelf = stock(hf);

export async function sell(orderId: string, sku: string, pieces: number): Promise<void> {
  // Throws an InsufficientStockError that names what fell short, and takes nothing.
  await shelf.apply([{ sku, quantity: -pieces }], { source: "ORDER", externalId: orderId });
}`,
  page: "stock.md",
};

const goodsReserved: Tool = {
  use: "stock(hf).reserve, then commit",
  why: "The pieces are kept apart while somebody pays, and come back by themselves if nobody does.",
  needs: ["stock"],
  imports: { stock: "holdfast/stock" },
  code: `const shelf = stock(hf);

export async function checkout(cartId: string, sku: string, pay: () => Promise<void>): Promise<void> {
  const kept = await shelf.reserve([{ sku, quantity: 1 }], { id: cartId, ttl: 15 * 60_000 });
  try {
    await pay();
  } catch (error) {
    await kept.release();
    throw error;
  }
  await kept.commit();
}`,
  page: "stock.md#reservations",
};

const shortJobs: Tool = {
  use: "queue(hf, …).work with transactional: true",
  why: "The job ends in the transaction in which its handler writes: its effects happen once, whoever dies.",
  needs: ["queues"],
  imports: { queue: "holdfast/queue", sql: "holdfast" },
  code: `const orders = queue<{ order: number }>(hf, "orders");

export async function add(order: number): Promise<void> {
  await orders.enqueue({ order });
}

export const worker = orders.work(
  async (job, tx) => {
    await tx.query(sql\`UPDATE orders SET state = 'packed' WHERE id = \${job.payload.order}\`);
  },
  { transactional: true },
);`,
  page: "queue.md#what-workers-promise",
};

const longJobs: Tool = {
  use: "queue(hf, …).work, with job.complete(tx)",
  why: "The slow part is outside of the transaction; what is written and the end of the job are committed together.",
  needs: ["queues"],
  imports: { queue: "holdfast/queue", sql: "holdfast" },
  code: `const emails = queue<{ to: string }>(hf, "emails", { retries: 5 });

export async function add(to: string): Promise<void> {
  await emails.enqueue({ to });
}

export const work = (send: (to: string, signal: AbortSignal) => Promise<string>) =>
  emails.work(async (job) => {
    const receipt = await send(job.payload.to, job.signal);
    await hf.transaction(async (tx) => {
      await tx.query(sql\`INSERT INTO sent (job, receipt) VALUES (\${job.id}, \${receipt})\`);
      await job.complete(tx);
    });
  });`,
  page: "queue.md#what-workers-promise",
};

const due: Tool = {
  use: "schedule(hf, …), with run.complete(tx)",
  why: "Each tick once, in one of the instances; taken over if that one dies, and caught up with what was missed.",
  needs: ["schedules"],
  imports: { schedule: "holdfast/schedule", sql: "holdfast" },
  code: `export const report = schedule(hf, "report", { every: "1 day", timeZone: "Europe/Madrid" }, async (run) => {
  await hf.transaction(async (tx) => {
    await tx.query(sql\`INSERT INTO report (night) VALUES (\${run.tick.toISOString()})\`);
    await run.complete(tx);
  });
});

await report.start(); // in every instance`,
  page: "schedules.md",
};

const dueJobs: Tool = {
  use: "schedule(hf, …) with enqueue, and queue(hf, …).work",
  why: "The tick is recorded in the transaction that enqueues its jobs, and workers share them.",
  needs: ["schedules", "queues"],
  imports: { queue: "holdfast/queue", schedule: "holdfast/schedule" },
  code: `const invoices = queue<{ night: string }>(hf, "invoices");

export const nightly = schedule(hf, "invoices", {
  every: "1 day",
  timeZone: "Europe/Madrid",
  enqueue: (night, tx) => invoices.enqueue({ night: night.toISOString() }, { tx }),
});

await nightly.start(); // in every instance
export const work = (write: (night: string, signal: AbortSignal) => Promise<void>) =>
  invoices.work((job) => write(job.payload.night, job.signal));`,
  page: "schedules.md#as-a-queued-job",
};

const articles = `interface Article {
  id: number;
  title: string;
  version: number; // ALTER TABLE article ADD COLUMN version integer NOT NULL DEFAULT 0
}

const articles = versioned<Article>(hf, "article");`;

const edited: Tool = {
  use: "versioned(hf, table).update",
  why: "Written only if nobody else has written it since; whoever was too late reads again and decides anew.",
  needs: ["versions"],
  imports: { versioned: "holdfast" },
  code: `${articles}

export async function trim(id: number): Promise<Article> {
  return articles.update(id, (now) => ({ title: now.title.trim() }));
}`,
  page: "versions.md",
};

const editedAfter: Tool = {
  use: "versioned(hf, table).updateAfter",
  why: "The slow work is done first, without a lock; then the row is locked, and written if it is still the one that was read.",
  needs: ["versions"],
  imports: { versioned: "holdfast" },
  code: `${articles}

export async function translate(id: number, ask: (text: string) => Promise<string>): Promise<Article> {
  return articles.updateAfter(
    id,
    (article) => ask(article.title), // no lock, no transaction, no connection
    (_article, title) => ({ title }),
  );
}`,
  page: "versions.md#updateafter-slow-work-first",
};

const editedByPeople: Tool = {
  use: "versioned(hf, table).update, with the version that the form had",
  why: "No lock should last while a person thinks: the form brings its version along, and is refused if that is out of date.",
  needs: ["versions"],
  imports: { versioned: "holdfast" },
  code: `${articles}

export async function save(id: number, form: { title: string; version: number }): Promise<Article> {
  return articles.update(id, (now) => {
    if (now.version !== form.version) throw new Error(\`It was changed meanwhile: \${now.title}\`);
    return { title: form.title };
  });
}`,
  page: "versions.md#a-form",
};

const lockedByKey: Tool = {
  use: "hf.transaction({ lock: [key(…), key(…)] }, …)",
  why: "There are no row locks here: a key for each row is locked, in one order for everybody.",
  needs: ["transactionLocks"],
  imports: { key: "holdfast", sql: "holdfast" },
  code: `export async function transfer(from: number, to: number, amount: number): Promise<void> {
  await hf.transaction({ lock: [key("account", from), key("account", to)] }, async (tx) => {
    const [payer] = await tx.query<{ balance: number }>(
      sql\`SELECT balance FROM account WHERE id = \${from}\`,
    );
    if (!payer || payer.balance < amount) throw new Error("not enough");
    await tx.query(sql\`UPDATE account SET balance = balance - \${amount} WHERE id = \${from}\`);
    await tx.query(sql\`UPDATE account SET balance = balance + \${amount} WHERE id = \${to}\`);
  });
}`,
  page: "choose.md#advisory-lock",
};

const lockedRows: Tool = {
  use: "tx.rows(table, keys)",
  why: "Rows are locked in the order of their keys, whoever asks: two transfers cannot deadlock.",
  needs: ["rowLocks"],
  imports: { sql: "holdfast" },
  code: `interface Account {
  id: number;
  balance: number;
}

export async function transfer(from: number, to: number, amount: number): Promise<void> {
  await hf.transaction(async (tx) => {
    const [payer] = await tx.rows<Account>("account", [from, to]);
    if (!payer || payer.balance < amount) throw new Error("not enough");
    await tx.query(sql\`UPDATE account SET balance = balance - \${amount} WHERE id = \${from}\`);
    await tx.query(sql\`UPDATE account SET balance = balance + \${amount} WHERE id = \${to}\`);
  });
}`,
  page: "rows.md",
  otherwise: lockedByKey,
};

const keysAfter: Tool = {
  ...lockedByKey,
  use: "the slow work first, then hf.transaction({ lock: [key(…), key(…)] }, …)",
  code: `export async function transfer(from: number, to: number, amount: number, ask: () => Promise<boolean>) {
  if (!(await ask())) throw new Error("refused"); // no lock, no transaction
  await hf.transaction({ lock: [key("account", from), key("account", to)] }, async (tx) => {
    const [payer] = await tx.query<{ balance: number }>(
      sql\`SELECT balance FROM account WHERE id = \${from}\`,
    );
    if (!payer || payer.balance < amount) throw new Error("not enough");
    await tx.query(sql\`UPDATE account SET balance = balance - \${amount} WHERE id = \${from}\`);
    await tx.query(sql\`UPDATE account SET balance = balance + \${amount} WHERE id = \${to}\`);
  });
}`,
};

const rowsAfter: Tool = {
  ...lockedRows,
  use: "the slow work first, then tx.rows(table, keys)",
  why: "Nobody should wait for another service, or a person, under a lock: that comes first, and the check after it.",
  code: `interface Account {
  id: number;
  balance: number;
}

export async function transfer(from: number, to: number, amount: number, ask: () => Promise<boolean>) {
  if (!(await ask())) throw new Error("refused"); // no lock, no transaction
  await hf.transaction(async (tx) => {
    const [payer] = await tx.rows<Account>("account", [from, to]);
    if (!payer || payer.balance < amount) throw new Error("not enough");
    await tx.query(sql\`UPDATE account SET balance = balance - \${amount} WHERE id = \${from}\`);
    await tx.query(sql\`UPDATE account SET balance = balance + \${amount} WHERE id = \${to}\`);
  });
}`,
  otherwise: keysAfter,
};

const lockedSum: Tool = {
  use: "hf.transaction({ lock: key(…) }, …)",
  why: "There is no row to lock, so what is checked gets a key of its own. Whoever has another key does not wait.",
  needs: ["transactionLocks"],
  imports: { key: "holdfast", sql: "holdfast" },
  code: `export async function upload(userId: string, bytes: number): Promise<void> {
  await hf.transaction({ lock: key("upload", userId) }, async (tx) => {
    const [sum] = await tx.query<{ used: number | string | null }>(
      sql\`SELECT sum(bytes) AS used FROM upload WHERE user_id = \${userId}\`,
    );
    if (Number(sum?.used ?? 0) + bytes > 1_000_000) throw new Error("The quota is used up");
    await tx.query(sql\`INSERT INTO upload (user_id, bytes) VALUES (\${userId}, \${bytes})\`);
  });
}`,
  page: "choose.md#advisory-lock",
};

const lockedSumAfter: Tool = {
  use: "the slow work first, then hf.transaction({ lock: key(…) }, …)",
  why: "Nobody should wait for another service under a lock: it is asked first, and the check comes after it.",
  needs: ["transactionLocks"],
  imports: { key: "holdfast", sql: "holdfast" },
  code: `export async function upload(userId: string, store: () => Promise<{ bytes: number }>): Promise<void> {
  const { bytes } = await store(); // no lock, no transaction
  await hf.transaction({ lock: key("upload", userId) }, async (tx) => {
    const [sum] = await tx.query<{ used: number | string | null }>(
      sql\`SELECT sum(bytes) AS used FROM upload WHERE user_id = \${userId}\`,
    );
    if (Number(sum?.used ?? 0) + bytes > 1_000_000) throw new Error("The quota is used up");
    await tx.query(sql\`INSERT INTO upload (user_id, bytes) VALUES (\${userId}, \${bytes})\`);
  });
}`,
  page: "choose.md#advisory-lock",
};

const leased: Tool = {
  use: "hf.lease(key(…)), with fenced writes",
  why: "A lock with an end, renewed while the process lives. One that wakes up too late is refused when it writes.",
  needs: ["leases"],
  imports: { fenced: "holdfast", key: "holdfast", sql: "holdfast" },
  code: `export async function load(customerId: string, pages: AsyncIterable<string>): Promise<void> {
  await using lease = await hf.lease(key("import", customerId), { ttl: 30_000, wait: 10_000 });
  for await (const page of pages) {
    lease.throwIfLost();
    await hf.transaction(async (tx) => {
      await fenced(tx, lease); // throws if somebody else has had it since
      await tx.query(sql\`INSERT INTO page (customer_id, body) VALUES (\${customerId}, \${page})\`);
    });
  }
}`,
  page: "leases.md",
};

const onlyOne: Tool = {
  use: "a UNIQUE constraint",
  why: "The server refuses the second row, whatever the code does. Nothing is safer or cheaper; no lock is needed.",
  needs: ["transactionLocks"],
  imports: { isUniqueViolation: "holdfast", sql: "holdfast" },
  code: `// CREATE UNIQUE INDEX booking_once ON booking (room_id, day)
export async function book(room: number, day: string): Promise<boolean> {
  try {
    await hf.transaction(async (tx) => {
      await tx.query(sql\`INSERT INTO booking (room_id, day) VALUES (\${room}, \${day})\`);
    });
    return true;
  } catch (error) {
    if (isUniqueViolation(error)) return false;
    throw error;
  }
}`,
  page: "choose.md#unique-constraint",
};

const onlyOneLater: Tool = {
  use: "hf.lease(key(…)), and a UNIQUE constraint",
  why: "The lease keeps others from doing the slow work in vain; the constraint is what makes it exact.",
  needs: ["leases"],
  imports: { fenced: "holdfast", key: "holdfast", sql: "holdfast" },
  code: `// CREATE UNIQUE INDEX tenant_once ON tenant (name)
export async function provision(name: string, create: (signal: AbortSignal) => Promise<string>): Promise<boolean> {
  await using lease = await hf.lease(key("provision", name), { wait: "skip" });
  if (!lease) return false; // somebody else is at it
  const place = await create(lease.signal);
  await hf.transaction(async (tx) => {
    await fenced(tx, lease);
    await tx.query(sql\`INSERT INTO tenant (name, place) VALUES (\${name}, \${place})\`);
  });
  return true;
}`,
  page: "leases.md",
};

const cameOnce: Tool = {
  use: "once(hf, id, body)",
  why: "The answer is kept in the transaction that does the work, and given again to whoever repeats the message.",
  needs: ["once"],
  imports: { once: "holdfast", sql: "holdfast" },
  code: `export async function webhook(event: { id: string; account: string; credits: number }): Promise<void> {
  await once(hf, ["payments", event.id], async (tx) => {
    await tx.query(
      sql\`UPDATE account SET credits = credits + \${event.credits} WHERE id = \${event.account}\`,
    );
  });
}`,
  page: "once.md",
};

const cameOnceLater: Tool = {
  use: "once(hf, id, body), which enqueues a job",
  why: "The message is answered at once, and its work is a job that a worker does: neither is lost, and neither comes twice.",
  needs: ["once", "queues"],
  imports: { once: "holdfast", queue: "holdfast/queue" },
  code: `const imports = queue<{ file: string }>(hf, "imports");

export async function webhook(event: { id: string; file: string }): Promise<void> {
  await once(hf, ["imports", event.id], async (tx) => {
    await imports.enqueue({ file: event.file }, { tx });
  });
}

export const work = (load: (file: string, signal: AbortSignal) => Promise<void>) =>
  imports.work((job) => load(job.payload.file, job.signal));`,
  page: "once.md",
};

const tried: Tool = {
  use: "hf.tryLock(key(…), body)",
  why: "Runs the body if nobody else does right now, and says so if somebody does. The lock ends with the transaction.",
  needs: ["transactionLocks"],
  imports: { key: "holdfast", sql: "holdfast" },
  code: `export async function cleanUp(): Promise<boolean> {
  const { acquired } = await hf.tryLock(key("clean-up"), async (tx) => {
    await tx.query(sql\`DELETE FROM image WHERE deleted = 1\`);
  });
  return acquired;
}`,
  page: "quick-start.md#if-somebody-else-is-at-it-do-nothing",
};

const triedLonger: Tool = {
  use: 'hf.lease(key(…), { wait: "skip" })',
  why: "Longer than a transaction should be: a lock with an end, renewed while the process lives. For work that never ends: leader.",
  needs: ["leases"],
  imports: { key: "holdfast" },
  code: `export async function rebuild(index: string, run: (signal: AbortSignal) => Promise<void>): Promise<boolean> {
  await using lease = await hf.lease(key("rebuild", index), { wait: "skip" });
  if (!lease) return false; // somebody else is at it
  await run(lease.signal); // aborts before anybody else can get the lease
  return true;
}`,
  page: "leases.md",
};

const none: Tool = {
  use: "nothing",
  why: "A lock that protects nothing only costs time.",
  needs: [],
  imports: {},
  code: `// The plain statement, with your own client.
export const log = (client: { query(text: string): Promise<unknown> }) =>
  client.query("INSERT INTO log (line) VALUES ('it was here')");`,
  page: "choose.md#nothing",
};

/** By what is checked, and how long the work takes. */
export const tools: Readonly<Record<What, Readonly<Record<Long, Tool>>>> = {
  limit: { statements: limit, seconds: limitHeld, minutes: limitHeld },
  credits: { statements: credits, seconds: creditsHeld, minutes: creditsHeld },
  stock: { statements: goods, seconds: goodsReserved, minutes: goodsReserved },
  jobs: { statements: shortJobs, seconds: longJobs, minutes: longJobs },
  time: { statements: due, seconds: due, minutes: dueJobs },
  row: { statements: edited, seconds: editedAfter, minutes: editedByPeople },
  rows: { statements: lockedRows, seconds: rowsAfter, minutes: rowsAfter },
  sum: { statements: lockedSum, seconds: lockedSumAfter, minutes: leased },
  unique: { statements: onlyOne, seconds: onlyOneLater, minutes: onlyOneLater },
  message: { statements: cameOnce, seconds: cameOnceLater, minutes: cameOnceLater },
  running: { statements: tried, seconds: triedLonger, minutes: triedLonger },
  nothing: { statements: none, seconds: none, minutes: none },
};

/** What these databases lack, of what a tool may need: `test/choose.test.ts` compares it with what they say themselves. */
export const lacking: Readonly<Partial<Record<Database, readonly Need[]>>> = { duckdb: ["rowLocks"] };

/** Where a lock of a transaction needs no table of Holdfast's own. */
export const tableless: readonly Database[] = ["postgres", "sqlite", "libsql"];
