// Shows the text output of sdfastgn's nodes on the nodes themselves.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NAME = "sdfastgn_text";

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
  app.graph.setDirtyCanvas(true, false);
}

app.registerExtension({
  name: "sdfastgn.text",
  setup() {
    // Sent when ComfyUI has run the model or loaded the VAE. `detail.node` is the id of the node that shows the new text.
    api.addEventListener("sdfastgn.text", ({ detail }) => {
      const node = app.graph.getNodeById(detail.node);
      if (node) show(node, detail.text);
    });
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("Sdfastgn")) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, message.text.join("\n"));
    };
  },
});
