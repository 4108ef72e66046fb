/** A few calls that are the same on every server, for tests whose statements are, too. */
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import type { Scenario } from "holdfast/testing";
import {
  type Pool as MysqlPool,
  type PoolConnection,
  type ResultSetHeader,
  createPool,
} from "mysql2/promise";
import { Pool, type PoolClient } from "pg";

export const sqlServers = ["postgres", "postgresOld", "mariadb", "mysql"] as const;
export type SqlServer = (typeof sqlServers)[number];

export type Row = Record<string, unknown>;

/** Statements without values, so that they need no placeholders, which are written differently. */
export interface Statements {
  rows(text: string): Promise<Row[]>;
  /** How many rows it has changed. */
  change(text: string): Promise<number>;
  /** The first column of the first row. */
  number(text: string): Promise<number>;
}

export interface SqlClient extends Statements {
  readonly db: Scenario["db"];
  /** One after the other, each by itself. */
  script(...texts: string[]): Promise<void>;
  transaction<T>(body: (statements: Statements) => Promise<T>, begin?: readonly string[]): Promise<T>;
  /** A connection of its own for this. */
  connected<T>(body: (statements: Statements) => Promise<T>): Promise<T>;
  end(): Promise<void>;
}

interface Lent extends Statements {
  /** `broken`: nobody is to have it again. */
  release(broken: boolean): void;
}

export const isMysql = (server: SqlServer): boolean => server === "mariadb" || server === "mysql";

export function openSql(server: SqlServer, url: string, size = 6): SqlClient {
  return isMysql(server) ? onMysql(url, size) : onPostgres(url, size);
}

function onPostgres(connectionString: string, max: number): SqlClient {
  const pool = new Pool({ connectionString, max });
  // Some tests end sessions on purpose.
  pool.on("error", () => {});
  const connect = async (): Promise<Lent> => {
    const client = await pool.connect();
    client.on("error", ignored);
    return {
      ...pgStatements(client),
      release(broken) {
        client.off("error", ignored);
        client.release(broken);
      },
    };
  };
  return client(fromPg(pool), pgStatements(pool), connect, () => pool.end());
}

const ignored = (): void => {};

function pgStatements(on: Pool | PoolClient): Statements {
  const rows = async (text: string) => (await on.query(text)).rows as Row[];
  return { rows, number: numberOf(rows), change: async (text) => (await on.query(text)).rowCount ?? 0 };
}

function onMysql(uri: string, connectionLimit: number): SqlClient {
  const pool = createPool({ uri, connectionLimit });
  const connect = async (): Promise<Lent> => {
    const connection = await pool.getConnection();
    return {
      ...mysqlStatements(connection),
      release: (broken) => (broken ? connection.destroy() : connection.release()),
    };
  };
  return client(fromMysql2(pool), mysqlStatements(pool), connect, () => pool.end());
}

function mysqlStatements(on: MysqlPool | PoolConnection): Statements {
  const rows = async (text: string) => (await on.query(text))[0] as Row[];
  return {
    rows,
    number: numberOf(rows),
    change: async (text) => (await on.query<ResultSetHeader>(text))[0].affectedRows,
  };
}

const numberOf = (rows: Statements["rows"]) => async (text: string) =>
  Number(Object.values((await rows(text))[0] ?? {})[0]);

function client(
  db: SqlClient["db"],
  statements: Statements,
  connect: () => Promise<Lent>,
  end: () => Promise<void>,
): SqlClient {
  return {
    ...statements,
    db,
    end,
    async script(...texts) {
      for (const text of texts) await statements.rows(text);
    },
    async transaction(body, begin = ["START TRANSACTION"]) {
      const lent = await connect();
      let broken = true;
      try {
        for (const text of begin) await lent.rows(text);
        const value = await body(lent);
        await lent.rows("COMMIT");
        broken = false;
        return value;
      } catch (error) {
        await lent.rows("ROLLBACK").then(
          () => (broken = false),
          () => {},
        );
        throw error;
      } finally {
        lent.release(broken);
      }
    },
    async connected(body) {
      const lent = await connect();
      try {
        return await body(lent);
      } finally {
        lent.release(false);
      }
    },
  };
}
