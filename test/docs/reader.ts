/**
 * What a reader has already, in the blocks of code that do not say where a name comes from: with its type, so that what is done
 * with it is checked. Of a name that is not here either, nothing is known. `db$Kysely` is `db` in the tab of Kysely.
 */
import type Database from "better-sqlite3";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import type { Holdfast } from "holdfast";
import type { Queue } from "holdfast/queue";
import type { Quota } from "holdfast/quota";
import type { Stock } from "holdfast/stock";
import type { Knex } from "knex";
import type { Kysely } from "kysely";
import type { Pool as MysqlPool } from "mysql2/promise";
import type { Pool, PoolClient } from "pg";
import type { Sql } from "postgres";
import type { Sequelize } from "sequelize";
import type { DataSource } from "typeorm";
import type * as scenario from "../../site/scenarios/scenario.ts";

export declare const hf: Holdfast<PoolClient>;
export declare const pool: Pool;
export declare const sql: Sql;
export declare const knex: Knex;
export declare const dataSource: DataSource;
export declare const sequelize: Sequelize;
export declare const sqlite: Database.Database;
export declare const db$Kysely: Kysely<Record<string, Record<string, unknown>>>;
export declare const db$Drizzle: NodePgDatabase & { $client: Pool };
export declare const pool$mysql2: MysqlPool;
export declare const uploads: Quota;
export declare const credits: Quota;
export declare const shelf: Stock;
export declare const emails: Queue<{ to: string; subject: string }>;
export declare const inTransaction: typeof scenario.inTransaction;
export declare const one: typeof scenario.one;
export declare const userId: string;
export declare const orderId: string;
export declare const bytes: number;
