/**
 * Flows of applications that go wrong if two of them run at the same time, as their authors would have written them,
 * and the same flows done right. Nothing here knows of the tool that looks for the races.
 */
import type { Clients } from "./clients.ts";

export type Engine = "postgres" | "mariadb";

export type ClientName =
  | "pg"
  | "postgres"
  | "mysql2"
  | "prisma"
  | "drizzle"
  | "kysely"
  | "knex"
  | "typeorm"
  | "mikro-orm"
  | "sequelize";

/** What each actor returned or threw. */
export type Results = Readonly<Record<string, PromiseSettledResult<unknown>>>;

export interface Version {
  /** Requests that come at the same time. */
  actors(clients: Clients): Record<string, () => Promise<unknown>>;
  /** What this version needs in the database besides the flow's tables: a constraint, an index. */
  readonly migration?: readonly string[];
}

export type Anomaly = "lost update" | "write skew" | "phantom" | "deadlock";

interface Flow {
  readonly title: string;
  readonly client: ClientName;
  /** Where its SQL is understood. */
  readonly engines: readonly Engine[];
  /** What stands between the parentheses of CREATE TABLE, by the name of the table; made in this order. */
  readonly tables: Readonly<Record<string, string>>;
  /** The rows that are there before the actors come. */
  readonly rows: readonly string[];
  /** Anything else that has to be there once, or has to be emptied besides the tables. */
  prepare?(clients: Clients): Promise<unknown>;
  readonly emptied?: readonly string[];
  /** Entities that an ORM has to know when it starts. */
  readonly entities?: { readonly typeorm?: readonly object[]; readonly mikroOrm?: readonly object[] };
  /** Throws if the rule of the application is broken. A refused request is none of its business, unless it says so. */
  invariant(clients: Clients, results: Results): Promise<void>;
}

/** A race, and the same flow without it. */
export interface Race extends Flow {
  /** Where it was reported. */
  readonly source?: string;
  readonly naive: Version;
  readonly fixed: Version;
  /** What somebody who reads the code would call it; for some there is no name. */
  readonly expects?: Anomaly;
}

/** A flow in which there is nothing to find. */
export interface Exact extends Flow {
  readonly correct: Version;
}

export const everywhere: readonly Engine[] = ["postgres", "mariadb"];
export const postgresOnly: readonly Engine[] = ["postgres"];

/** How many were not refused. */
export function accepted(results: Results): number {
  return Object.values(results).filter(({ status }) => status === "fulfilled").length;
}

/** Whether this one was not refused. */
export function was(results: Results, actor: string): boolean {
  return results[actor]?.status === "fulfilled";
}

/** What those returned that were not refused. */
export function values(results: Results): unknown[] {
  return Object.values(results).flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
}

/** The only number that a query brings: servers and drivers differ in what they count with. */
export async function number({ query }: Clients, sql: string): Promise<number> {
  const [row] = await query(sql);
  return Number(Object.values(row ?? {})[0]);
}
