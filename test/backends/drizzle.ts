import type { ConformanceSite } from "holdfast/testing";

async function site(db: {
  transaction: (...args: never[]) => unknown;
  $client: unknown;
}): Promise<Pick<ConformanceSite, "database" | "ownTransaction" | "send">> {
  const { fromDrizzle } = await import("holdfast/drizzle");
  return {
    database: fromDrizzle(db),
    send: sendDrizzle,
    ownTransaction: (body) => (db.transaction as (body: unknown) => Promise<never>)(body),
  };
}

/** SQLite's have another name for it. */
export const sendDrizzle: ConformanceSite["send"] = (native, text) => {
  const { execute, run } = native as Record<"execute" | "run", ((text: string) => unknown) | undefined>;
  return (execute ?? run)?.call(native, text);
};

/** What a transaction looks like to Holdfast, with a client that is in none. */
const idle = (client: unknown) => ({ session: { client }, rollback() {}, transaction() {} });

export async function openDrizzle(connectionString: string): Promise<ConformanceSite> {
  const [{ Pool }, { drizzle }] = await Promise.all([import("pg"), import("drizzle-orm/node-postgres")]);
  const pool = new Pool({ connectionString, max: 10, application_name: "test" });
  pool.on("error", () => {});
  return {
    ...(await site(drizzle(pool))),
    async withIdle(body) {
      const client = await pool.connect();
      try {
        return await body(idle(client));
      } finally {
        client.release();
      }
    },
    close: () => pool.end(),
  };
}

export async function openDrizzlePostgres(url: string, options: object = {}): Promise<ConformanceSite> {
  const [{ default: postgres }, { drizzle }] = await Promise.all([
    import("postgres"),
    import("drizzle-orm/postgres-js"),
  ]);
  const sql = postgres(url, { max: 10, onnotice: () => {}, ...options });
  return {
    ...(await site(drizzle(sql))),
    async withIdle(body) {
      const reserved = await sql.reserve();
      try {
        return await body(idle(reserved));
      } finally {
        reserved.release();
      }
    },
    close: () => sql.end({ timeout: 5 }),
  };
}

export async function openDrizzleMysql(uri: string): Promise<ConformanceSite> {
  const [{ createPool }, { drizzle }] = await Promise.all([
    import("mysql2/promise"),
    import("drizzle-orm/mysql2"),
  ]);
  const pool = createPool({ uri, connectionLimit: 10 });
  return {
    ...(await site(drizzle(pool))),
    async withIdle(body) {
      const connection = await pool.getConnection();
      try {
        return await body(idle(connection));
      } finally {
        connection.release();
      }
    },
    close: () => pool.end(),
  };
}

export async function openDrizzleLibsql(file: string): Promise<ConformanceSite> {
  const [{ createClient }, { drizzle }] = await Promise.all([
    import("@libsql/client"),
    import("drizzle-orm/libsql"),
  ]);
  const client = createClient({ url: `file:${file}` });
  await client.execute("PRAGMA journal_mode = WAL");
  return {
    ...(await site(drizzle(client))),
    // One that has ended is the only thing that looks like a transaction and is none.
    async withIdle(body) {
      const tx = await client.transaction("write");
      await tx.rollback();
      return body({ session: { client, tx }, rollback() {}, transaction() {} });
    },
    close: async () => client.close(),
  };
}
