import type { BookInfo } from "../core/stocks.ts";
import { deskOf } from "./desk.ts";

/** All stocks that have a level, by name. */
export async function stocks(hf: object): Promise<readonly BookInfo[]> {
  const desk = deskOf(hf, { name: "stock", table: undefined });
  return desk.alone(undefined, (connection, store) => store.books(connection));
}
