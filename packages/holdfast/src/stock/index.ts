export { type Finding, type Level, type Shortage, splitOrder } from "./domain.ts";
export { InsufficientStockError, StockConflictError, StockError, UnknownSkuError } from "./errors.ts";
export { stocks } from "./list.ts";
export type { BookInfo } from "./store.ts";
export type { Trust } from "../input/trust.ts";
export {
  type Applied,
  type AppliedLine,
  type ChannelSum,
  type CurrentLevel,
  type HistoryOptions,
  type Line,
  type Movement,
  type MovementOptions,
  type OwnLevels,
  type ReconcileOptions,
  type Reconciliation,
  type ReferenceOf,
  type Reservation,
  type ReserveOptions,
  type ReturnOptions,
  type SourceOf,
  type Stock,
  type StockOptions,
  type StockWords,
  type TransferOptions,
  stock,
} from "./stock.ts";
