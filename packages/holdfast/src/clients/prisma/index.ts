export { type PrismaExtension, holdfast } from "./extension.ts";
export { type PrismaClientLike, type PrismaTransaction, type TransactionOf, fromPrisma } from "./from.ts";
export type { PrismaLock } from "./find.ts";
// For those who need nothing else of `holdfast`, whose own `holdfast` is another one.
export { key, shared } from "../../seam/key.ts";
