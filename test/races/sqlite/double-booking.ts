/** A room, from one day to another, with TypeORM. */
import { DataSource, type EntityManager, EntitySchema } from "typeorm";
import { opened } from "./opened.ts";

interface Booking {
  id?: number;
  room: string;
  first: number;
  last: number;
}

const BookingSchema = new EntitySchema<Booking>({
  name: "Booking",
  tableName: "booking",
  columns: {
    id: { type: "int", primary: true, generated: true },
    room: { type: "text" },
    first: { type: "int" },
    last: { type: "int" },
  },
});

const open = opened((database) =>
  new DataSource({ type: "better-sqlite3", database, entities: [BookingSchema] }).initialize(),
);

async function book(manager: EntityManager, room: string, first: number, last: number): Promise<void> {
  const overlapping = await manager
    .createQueryBuilder(BookingSchema, "b")
    .where("b.room = :room AND b.first <= :last AND b.last >= :first", { room, first, last })
    .getCount();
  if (overlapping > 0) throw new Error("The room is taken");
  await manager.insert(BookingSchema, { room, first, last });
}

export async function naive(file: string, room: string, first: number, last: number): Promise<void> {
  const source = await open(file);
  await book(source.manager, room, first, last);
}

/** TypeORM begins its transactions deferred. */
export async function deferred(file: string, room: string, first: number, last: number): Promise<void> {
  const source = await open(file);
  await source.transaction((manager) => book(manager, room, first, last));
}

export async function immediate(file: string, room: string, first: number, last: number): Promise<void> {
  const source = await open(file);
  const runner = source.createQueryRunner();
  try {
    await runner.query("BEGIN IMMEDIATE");
    await book(runner.manager, room, first, last);
    await runner.query("COMMIT");
  } catch (error) {
    await runner.query("ROLLBACK");
    throw error;
  } finally {
    await runner.release();
  }
}
