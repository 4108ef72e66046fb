/** The shop's own tables, by Prisma, and by statements on whatever else DATABASE_URL names. */
import { type Transaction, sql } from "holdfast";
import type { TransactionOf } from "holdfast/prisma";
import type { Database } from "../database.ts";
import type { PrismaClient } from "./generated/client.ts";

export interface Purchase {
  readonly id: string;
  readonly email: string;
  readonly cents: number;
}

export interface Catalog {
  prices(skus: readonly string[]): Promise<ReadonlyMap<string, number>>;
  purchase(tx: Transaction<unknown>, purchase: Purchase): Promise<void>;
}

export function byPrisma(prisma: PrismaClient): Catalog {
  return {
    async prices(skus) {
      const variants = await prisma.variant.findMany({ where: { sku: { in: [...skus] } } });
      return new Map(variants.map(({ sku, cents }) => [sku, cents]));
    },
    async purchase({ client }, data) {
      await (client as TransactionOf<PrismaClient>).purchase.create({ data });
    },
  };
}

export function bySql({ query }: Database): Catalog {
  return {
    async prices(skus) {
      const prices = new Map<string, number>();
      for (const sku of new Set(skus)) {
        const [row] = await query<{ cents: number }>(sql`
          SELECT cents FROM holdfast_example_variant WHERE sku = ${sku}`);
        if (row) prices.set(sku, row.cents);
      }
      return prices;
    },
    async purchase(tx, { id, email, cents }) {
      await tx.query(
        sql`INSERT INTO holdfast_example_purchase (id, email, cents) VALUES (${id}, ${email}, ${cents})`,
      );
    },
  };
}
