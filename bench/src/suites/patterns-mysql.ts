/** Quota, stock and queue on MySQL or MariaDB, by mysql2, next to the same by hand. */
import { holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import {
  type Pool,
  type PoolConnection,
  type ResultSetHeader,
  type RowDataPacket,
  createPool,
} from "mysql2/promise";
import { scatter } from "../../../packages/cli/src/bench/measure.ts";
import { plenty } from "../../../packages/cli/src/bench/stock.ts";
import type { StartedServer } from "../../../test/harness/started-server.ts";
import { type Drain, type JobPayload, draining, holdfastDrain, payloads } from "./patterns-drain.ts";
import {
  acquaint,
  consuming,
  exact,
  fewEntries,
  hotSku,
  hotUser,
  limit,
  living,
  manyEntries,
  ordering,
  reconciled,
  shop as shopOf,
  shortLife,
  stockUp,
  units as unitsOf,
  users,
} from "./patterns-ours.ts";
import {
  type CountStatements,
  type PatternCell,
  type PatternGround,
  looping,
  textbook,
} from "./patterns-race.ts";

/** For both sides. More do not make a server with two cores faster. */
const connections = 16;

const skipLocked = "textbook: SKIP LOCKED, one job for a transaction";

const tables = [
  "CREATE TABLE account (user_id bigint PRIMARY KEY, used bigint NOT NULL)",
  `CREATE TABLE ledger (id bigint AUTO_INCREMENT PRIMARY KEY, user_id bigint NOT NULL, amount int NOT NULL, used bigint NOT NULL,
    request_id varchar(100) NOT NULL, at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), KEY (user_id))`,
  "CREATE TABLE variant (sku varchar(100) PRIMARY KEY, stock int NOT NULL)",
  `CREATE TABLE movement (id bigint AUTO_INCREMENT PRIMARY KEY, sku varchar(100) NOT NULL, quantity int NOT NULL,
    source varchar(20) NOT NULL, reference_type varchar(20), reference_id varchar(100),
    at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), KEY (sku, at))`,
  "CREATE TABLE job (id bigint AUTO_INCREMENT PRIMARY KEY, payload json NOT NULL, at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))",
];

export interface MysqlSettings {
  readonly name: string;
  /** Names of its ratios begin with this. */
  readonly prefix: string;
  /** With the settings that it comes with, as arguments of the server: those of tests are for speed. */
  readonly start: (settings: readonly string[]) => Promise<StartedServer>;
  readonly asItComes: readonly string[];
  readonly about: string;
  /** What was aimed at, by the names of ratios. */
  readonly wanted: Readonly<Record<string, number>>;
}

/** As it is written by hand, and done again after a deadlock. */
async function transaction<T>(pool: Pool, body: (connection: PoolConnection) => Promise<T>): Promise<T> {
  for (;;) {
    const connection = await pool.getConnection();
    try {
      await connection.beginTransaction();
      const result = await body(connection);
      await connection.commit();
      return result;
    } catch (error) {
      await connection.rollback();
      if ((error as { errno?: number }).errno !== 1213) throw error;
    } finally {
      connection.release();
    }
  }
}

async function first<T>(
  connection: Pick<PoolConnection, "execute">,
  text: string,
  values: (string | number)[],
): Promise<T | undefined> {
  const [rows] = await connection.execute<RowDataPacket[]>(text, values);
  return rows[0] as T | undefined;
}

function useByHand(pool: Pool, user: number, request: string): Promise<void> {
  return transaction(pool, async (connection) => {
    const row = await first<{ used: number }>(
      connection,
      "SELECT used FROM account WHERE user_id = ? FOR UPDATE",
      [user],
    );
    const used = Number(row?.used) + 1;
    if (!(used <= limit)) throw new Error("used up");
    await connection.execute("UPDATE account SET used = ? WHERE user_id = ?", [used, user]);
    await connection.execute("INSERT INTO ledger (user_id, amount, used, request_id) VALUES (?, 1, ?, ?)", [
      user,
      used,
      request,
    ]);
  });
}

function orderByHand(pool: Pool, sku: string, order: string): Promise<void> {
  return transaction(pool, async (connection) => {
    const row = await first<{ stock: number }>(
      connection,
      "SELECT stock FROM variant WHERE sku = ? FOR UPDATE",
      [sku],
    );
    if (!(Number(row?.stock) >= 1)) throw new Error("not enough");
    await connection.execute("UPDATE variant SET stock = stock - 1 WHERE sku = ?", [sku]);
    await connection.execute(
      "INSERT INTO movement (sku, quantity, source, reference_type, reference_id) VALUES (?, -1, 'ORDER', 'order', ?)",
      [sku, order],
    );
  });
}

/** Claimed, done and deleted in one transaction: a worker that dies leaves the job as it was. */
function drainByHand(pool: Pool): Drain {
  const one = (handler: (n: number) => void) =>
    transaction(pool, async (connection) => {
      const row = await first<{ id: number; payload: JobPayload | string }>(
        connection,
        "SELECT id, payload FROM job ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED",
        [],
      );
      if (!row) return false;
      const { n } = typeof row.payload === "string" ? (JSON.parse(row.payload) as JobPayload) : row.payload;
      handler(n);
      await connection.execute("DELETE FROM job WHERE id = ?", [row.id]);
      return true;
    });
  return {
    name: skipLocked,
    async fill(jobs) {
      await pool.query("TRUNCATE job");
      for (const some of payloads(jobs))
        await pool.query("INSERT INTO job (payload) VALUES ?", [some.map((each) => [JSON.stringify(each)])]);
    },
    async drain(_, handler) {
      const worker = async (): Promise<void> => {
        while (await one(handler));
      };
      await Promise.all(Array.from({ length: connections }, worker));
    },
    left: async () => Number((await first<{ n: number }>(pool, "SELECT count(*) AS n FROM job", []))?.n),
  };
}

/** A quota that has been used so often: its bucket, and a line for each use. */
async function live(pool: Pool, subject: string, entries: number): Promise<void> {
  const [{ insertId }] = await pool.query<ResultSetHeader>(
    `INSERT INTO holdfast_quota_bucket (quota, subject, used, held, credit, version, reset) VALUES ('life', ?, ?, 0, 0, ?, 0)`,
    [subject, entries, entries],
  );
  const digit =
    "(SELECT 0 d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)";
  const step = Math.min(entries, 100_000);
  const places = Array.from({ length: Math.log10(step) }, (_, place) => `${digit} d${place}`);
  const sum = places.map((_, place) => `d${place}.d * ${10 ** place}`).join(" + ");
  for (let from = 1; from <= entries; from += step)
    await pool.query(
      `INSERT INTO holdfast_quota_line (bucket, version, kind, id, amount, used, max, at)
        SELECT ?, n, 'consume', CONCAT('before-', n), 1, n, ?, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
        FROM (SELECT ${sum} + ? AS n FROM ${places.join(", ")}) numbers ORDER BY n`,
      [insertId, limit, from],
    );
}

export async function mysqlGround(settings: MysqlSettings): Promise<PatternGround> {
  const { prefix, wanted } = settings;
  await using cleanup = new AsyncDisposableStack();
  const server = await settings.start(settings.asItComes);
  cleanup.defer(() => server.stop());
  const admin = createPool({ uri: server.url, connectionLimit: 1 });
  cleanup.defer(() => admin.end());
  const database = `holdfast_bench_${process.pid}`;
  await admin.query(`CREATE DATABASE ${database}`);
  cleanup.defer(async () => void (await admin.query(`DROP DATABASE ${database}`)));
  const url = new URL(server.url);
  url.pathname = `/${database}`;
  const pool = (): Pool => {
    const made = createPool({ uri: url.href, connectionLimit: connections });
    cleanup.defer(() => made.end());
    return made;
  };
  const [theirs, ours] = [pool(), pool()];
  for (const table of tables) await theirs.query(table);
  await theirs.query("INSERT INTO account (user_id, used) VALUES ?", [
    Array.from({ length: users }, (_, user) => [user, 0]),
  ]);
  await theirs.query("INSERT INTO variant (sku, stock) VALUES (?, ?)", [hotSku, plenty]);
  const hf = holdfast(fromMysql2(ours));
  cleanup.defer(() => hf.close());
  await hf.migrate();
  const version = await first<{ version: string }>(admin, "SELECT VERSION() AS version", []);

  const sent: CountStatements = async () => {
    const [[row]] = (await admin.query("SHOW GLOBAL STATUS LIKE 'Questions'")) as unknown as [
      [{ Value: string }],
    ];
    return Number(row.Value);
  };
  let requests = 0;
  const wantedOf = (name: string) => (wanted[name] === undefined ? {} : { wanted: wanted[name] });
  const ratioTo = (what: string, ...others: string[]) => {
    const name = `${prefix}_${what}`;
    return [{ name, others, ...wantedOf(name) }];
  };
  const units = unitsOf(hf);
  const quotaCell = (name: string, ratio: string, user: (turn: number) => number): PatternCell => ({
    name,
    ratios: ratioTo(ratio, textbook),
    async open() {
      if (ratio === "quota_spread") await acquaint(units);
      return [
        looping(
          { name: textbook, call: (turn) => useByHand(theirs, user(turn), `request-${++requests}`) },
          undefined,
          sent,
        ),
        looping(consuming(units, user, ratio), undefined, sent),
      ];
    },
  });
  const cells: PatternCell[] = [
    quotaCell("quota, one hot subject, 64 callers", "quota_hot", () => hotUser),
    quotaCell("quota, 10,000 users, 64 callers", "quota_spread", (turn) => Math.floor(scatter(turn) * users)),
    {
      name: "stock, one hot SKU, 64 callers",
      ratios: ratioTo("stock_hot", textbook),
      async open() {
        await stockUp(shopOf(hf));
        return [
          looping(
            { name: textbook, call: () => orderByHand(theirs, hotSku, `order-${++requests}`) },
            undefined,
            sent,
          ),
          looping(ordering(shopOf(hf)), undefined, sent),
        ];
      },
    },
    {
      name: "queue, drain",
      ratios: ratioTo("drain", skipLocked),
      open: async () => [draining(drainByHand(theirs), sent), draining(holdfastDrain(hf), sent)],
    },
    {
      name: "quota, one caller",
      ratios: ratioTo("long_life", shortLife),
      async open() {
        await live(ours, "short", fewEntries);
        await live(ours, "long", manyEntries);
        await ours.query("ANALYZE TABLE holdfast_quota_line");
        return living(hf).map((each) => looping(each, 1, sent));
      },
    },
  ];
  const rest = cleanup.move();
  return {
    name: settings.name,
    about: `${settings.name} ${version?.version}, mysql2, ${connections} connections for each side; ${settings.about}`,
    cells,
    async check() {
      const uses = await first<{ lost: number }>(
        theirs,
        "SELECT (SELECT count(*) FROM ledger) - (SELECT sum(used) FROM account) AS lost",
        [],
      );
      exact("uses that the textbook has lost", Number(uses?.lost), 0);
      await reconciled(units, shopOf(hf));
    },
    [Symbol.asyncDispose]: () => rest.disposeAsync(),
  };
}
