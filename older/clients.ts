/** Clients of older majors that are still in wide use: what is imported here is resolved to theirs. */
import { PrismaPg } from "@prisma/adapter-pg";
import { DataSource, type DataSourceOptions } from "typeorm";
import { PrismaClient } from "./generated/prisma/client.ts";

export const prisma6 = (connectionString: string) =>
  new PrismaClient({ adapter: new PrismaPg({ connectionString, max: 10 }) });

export const typeorm03 = (options: DataSourceOptions) => new DataSource(options);
