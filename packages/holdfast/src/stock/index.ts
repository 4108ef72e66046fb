export { type Finding, type Level, type Shortage, splitOrder } from "./domain.ts";
export { InsufficientStockError, StockConflictError, StockError, UnknownSkuError } from "./errors.ts";
export { stocks } from "./list.ts";
export type { BookInfo } from "./store.ts";
export type { Trust } from "../input/trust.ts";
export type {
  Applied,
  AppliedLine,
  ChannelSum,
  CurrentLevel,
  HistoryOptions,
  Line,
  Movement,
  MovementOptions,
  OwnLevels,
  ReconcileOptions,
  Reconciliation,
  ReferenceOf,
  Reservation,
  ReserveOptions,
  ReturnOptions,
  SourceOf,
  StockOptions,
  StockWords,
  TransferOptions,
} from "./types.ts";
export { type Stock, stock } from "./stock.ts";
