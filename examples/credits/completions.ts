/** The app's own table, by Prisma, and by statements on whatever else DATABASE_URL names. */
import { type Transaction, sql } from "holdfast";
import type { TransactionOf } from "holdfast/prisma";
import type { Database } from "../database.ts";
import type { PrismaClient } from "./generated/client.ts";

export interface Stored {
  readonly prompt: string;
  readonly text: string;
  readonly tokens: number;
}

export interface Completion extends Stored {
  readonly userId: string;
  readonly requestId: string;
}

export interface Completions {
  find(userId: string, requestId: string): Promise<Stored | undefined>;
  /** Twice the same id is an error: its primary key is what lets one of two through. */
  create(tx: Transaction<unknown>, completion: Completion): Promise<void>;
}

export function byPrisma(prisma: PrismaClient): Completions {
  return {
    async find(userId, requestId) {
      const where = { userId_requestId: { userId, requestId } };
      return (await prisma.completion.findUnique({ where })) ?? undefined;
    },
    async create({ client }, data) {
      await (client as TransactionOf<PrismaClient>).completion.create({ data });
    },
  };
}

export function bySql({ query }: Database): Completions {
  return {
    async find(userId, requestId) {
      const [row] = await query<Stored>(sql`SELECT prompt, text, tokens FROM holdfast_example_completion
        WHERE user_id = ${userId} AND request_id = ${requestId}`);
      return row;
    },
    async create(tx, { userId, requestId, prompt, text, tokens }) {
      await tx.query(sql`INSERT INTO holdfast_example_completion (user_id, request_id, prompt, text, tokens)
        VALUES (${userId}, ${requestId}, ${prompt}, ${text}, ${tokens})`);
    },
  };
}
