// Shows the text output of sdfastgn's nodes on the nodes themselves.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NAME = "sdfastgn_text";
const PREFIX = "Sdfastgn"; // with which the types of our nodes begin

// The server calls a node inside of a subgraph "5:3": node 3 of the subgraph that node 5 stands for.
// Undefined if there is none of our nodes, because the page may show another workflow by now.
function nodeOf(id) {
  const outer = String(id).split(":");
  const inner = outer.pop();
  let graph = app.graph;
  for (const each of outer) graph = graph?.getNodeById(each)?.subgraph;
  const node = graph?.getNodeById(inner);
  return node?.type?.startsWith(PREFIX) ? node : undefined;
}

function show(node, text) {
  let widget = node.widgets?.find((each) => each.name === NAME);
  if (!widget) {
    widget = ComfyWidgets["STRING"](node, NAME, ["STRING", { multiline: true }], app).widget;
    widget.serialize = false; // do not save the text in the workflow: it belongs to one run
    widget.options.serialize = false;
    if (widget.inputEl) widget.inputEl.readOnly = true;
  }
  widget.value = text;
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width, 420), Math.max(node.size[1], height + 60)]);
  node.setDirtyCanvas(true, false);
}

app.registerExtension({
  name: "sdfastgn.text",
  setup() {
    // Sent when ComfyUI has run the model or loaded the VAE. `detail.node` is the id of the node that shows the new text.
    api.addEventListener("sdfastgn.text", ({ detail }) => {
      const node = nodeOf(detail.node);
      if (node) show(node, detail.text);
    });
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith(PREFIX)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, message.text.join("\n"));
    };
  },
});
